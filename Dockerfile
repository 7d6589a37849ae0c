# syntax=docker/dockerfile:1
# Images of the command line, described in docs/guides/docker.md:
#   docker build --target cpu --tag splatcli:cpu .
#   docker build --target cuda --tag splatcli:cuda .

FROM python:3.12-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# A wheel with the CPU libraries, so that the images need no compiler.
FROM base AS wheel-cpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python -m pip install "build>=1.2" "hatchling>=1.26" "ninja>=1.11"
COPY . .
RUN PYTHONPATH=. python scripts/build_wheels.py --machine "$(uname -m)" --dist dist --no-cuda

# The same wheel with the CUDA library, for sm_75 to sm_120.
FROM wheel-cpu AS wheel-cuda
RUN python -m pip install "nvidia-cuda-nvcc>=13,<14" "nvidia-cuda-runtime>=13,<14" "nvidia-cuda-crt>=13,<14" "nvidia-nvvm>=13,<14"
RUN rm -r dist && PYTHONPATH=. python scripts/build_wheels.py --machine "$(uname -m)" --dist dist

# What both images share: a user without rights, who works in /work.
FROM base AS runtime
RUN useradd --create-home --uid 1000 splat && mkdir /work && chown splat:splat /work
WORKDIR /work

FROM runtime AS cuda
COPY constraints.txt /opt/
RUN python -m pip install --constraint /opt/constraints.txt torch
RUN --mount=type=bind,from=wheel-cuda,source=/src/dist,target=/dist \
    python -m pip install --constraint /opt/constraints.txt "$(echo /dist/*.whl)[video,exr,spz]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
ENTRYPOINT ["splat"]
CMD ["--help"]

# Last, so that it is what a build without --target makes.
FROM runtime AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /opt/
RUN python -m pip install --constraint /opt/constraints.txt --index-url "$TORCH_INDEX" torch
RUN --mount=type=bind,from=wheel-cpu,source=/src/dist,target=/dist \
    python -m pip install --constraint /opt/constraints.txt "$(echo /dist/*.whl)[video,exr,spz]"
USER 1000:1000
ENTRYPOINT ["splat"]
CMD ["--help"]
