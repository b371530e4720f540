// SPDX-License-Identifier: BSD-3-Clause
#include "backend/ddp_hook.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <utility>

namespace powersgd {

void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<AttachedModel> model) {
  model->backend()->add_model(model);
  reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(model)));
}

}  // namespace powersgd
