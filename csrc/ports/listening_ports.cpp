// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/listening_ports.h"

#include <link.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

namespace powersgd {
namespace {

struct Ports {
  uint16_t first, last;
};
std::atomic<Ports> ports{Ports{0, 0}};

bool is_tcp(int socket) {
  int type = 0;
  socklen_t size = sizeof(type);
  return getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
}

bool is_internet(const sockaddr* address) {
  return address->sa_family == AF_INET || address->sa_family == AF_INET6;
}

int bind_within(int socket, const sockaddr* address, socklen_t size) {
  const Ports allowed = ports;
  sockaddr_storage chosen{};
  if (allowed.first == 0 || size > sizeof(chosen) || !is_internet(address) || !is_tcp(socket)) {
    return bind(socket, address, size);
  }
  std::memcpy(&chosen, address, size);
  in_port_t& port = reinterpret_cast<sockaddr_in*>(&chosen)->sin_port;  // sin6_port lies there too
  if (port != 0) return bind(socket, address, size);
  // With SO_REUSEADDR, two processes could bind one port, and the second would fail to listen.
  const int off = 0;
  setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &off, sizeof(off));
  for (uint32_t candidate = allowed.first; candidate <= allowed.last; ++candidate) {
    port = htons(static_cast<uint16_t>(candidate));
    if (bind(socket, reinterpret_cast<sockaddr*>(&chosen), size) == 0) return 0;
    if (errno != EADDRINUSE) return -1;
  }
  return -1;
}

using Relocation = ElfW(Rela);
using Symbol = ElfW(Sym);

// The table of the functions that a library calls in others (System V ABI, "Relocation").
struct Calls {
  const Relocation* relocations;
  const Symbol* symbols;
  const char* names;
  size_t count;
};

Calls calls_of(const dl_phdr_info& library) {
  Calls calls{};
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    if (library.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const ElfW(Addr) dynamic = library.dlpi_addr + library.dlpi_phdr[i].p_vaddr;
    for (auto* entry = reinterpret_cast<const ElfW(Dyn)*>(dynamic); entry->d_tag; ++entry) {
      const auto address = entry->d_un.d_ptr;
      if (entry->d_tag == DT_JMPREL) calls.relocations = reinterpret_cast<Relocation*>(address);
      if (entry->d_tag == DT_SYMTAB) calls.symbols = reinterpret_cast<Symbol*>(address);
      if (entry->d_tag == DT_STRTAB) calls.names = reinterpret_cast<const char*>(address);
      if (entry->d_tag == DT_PLTRELSZ) calls.count = entry->d_un.d_val / sizeof(Relocation);
    }
  }
  return calls;
}

bool replace(void** slot) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(slot);
  void* const start = reinterpret_cast<void*>(address & ~(page - 1));
  if (mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(slot, reinterpret_cast<void*>(&bind_within), __ATOMIC_RELEASE);
  return true;
}

int replace_bind(dl_phdr_info* library, size_t /*size*/, void* /*data*/) {
  if (std::strstr(library->dlpi_name, "/libtorch_cpu.so") == nullptr) return 0;
  const Calls calls = calls_of(*library);
  for (size_t i = 0; i < calls.count; ++i) {
    const Relocation& call = calls.relocations[i];
    const char* name = calls.names + calls.symbols[ELF64_R_SYM(call.r_info)].st_name;
    if (std::strcmp(name, "bind") != 0) continue;
    return replace(reinterpret_cast<void**>(library->dlpi_addr + call.r_offset)) ? 1 : 0;
  }
  return 0;
}

}  // namespace

bool listen_within(uint16_t first, uint16_t last) {
  static bool replaced = false;
  if (!replaced && first != 0) replaced = dl_iterate_phdr(&replace_bind, nullptr) != 0;
  ports = Ports{first, last};
  return replaced || first == 0;
}

}  // namespace powersgd
