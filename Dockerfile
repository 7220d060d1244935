# The environment of `make venv`, as an image. The build folder is a checkout of this repository.
#
#   docker build -t moe_rl:cpu .                                                              # a machine without a GPU
#   docker build -t moe_rl:gpu --build-arg GPU=1 --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 .
#
# The GPU image needs the CUDA compiler while it is built: transformer-engine's part for torch is compiled here.
# Neither image was built where moe_rl is developed: there is no image registry there.
ARG BASE=ubuntu:24.04
FROM ${BASE}

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential cmake git libnuma1 make ninja-build python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/moe_rl
COPY . .
ARG GPU=
RUN make venv PYTHON=python3.12 GPU=${GPU}
ENV PATH=/opt/moe_rl/.venv/bin:${PATH}
CMD ["moe-rl", "doctor"]
