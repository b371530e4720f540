# torch-powersgd for CPUs, with the examples:
#
#   docker build --file docker/cpu.Dockerfile --tag torch-powersgd .
#   docker run --rm --ipc host torch-powersgd \
#       torchrun --nproc-per-node 2 examples/train_lm.py --backend powersgd
#
# PIP_INDEX_URL may name an index of torch wheels without CUDA, which are smaller.
FROM python:3.12-slim

ARG TORCH=torch==2.13.0
ARG PIP_INDEX_URL
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "$TORCH"
RUN env --unset=PIP_INDEX_URL pip install --no-cache-dir numpy ninja "setuptools>=77,<82"

WORKDIR /opt/torch-powersgd
COPY . .
RUN POWERSGD_BUILD_CUDA=0 env --unset=PIP_INDEX_URL \
    pip install --no-cache-dir --no-build-isolation . && rm -rf build
CMD ["python", "-m", "torch_powersgd", "doctor"]
