# torch-powersgd for NVIDIA GPUs, with the examples:
#
#   docker build --file docker/cuda.Dockerfile --tag torch-powersgd:cuda .
#   docker run --rm --gpus all --ipc host torch-powersgd:cuda
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04

ARG TORCH=torch==2.13.0
ARG TORCH_CUDA_ARCH_LIST="7.5;8.0;9.0;10.0;12.0+PTX"
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
RUN python3 -m venv "$VIRTUAL_ENV" \
    && pip install --no-cache-dir "$TORCH" numpy ninja "setuptools>=77,<82"

WORKDIR /opt/torch-powersgd
COPY . .
RUN POWERSGD_BUILD_CUDA=1 TORCH_CUDA_ARCH_LIST="$TORCH_CUDA_ARCH_LIST" \
    pip install --no-cache-dir --no-build-isolation . && rm -rf build
CMD ["python", "-m", "torch_powersgd", "doctor"]
