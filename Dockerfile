# Turnwise for a CPU, or for a GPU with the base image's CUDA build of torch:
#   docker build -t turnwise .
#   docker run --rm -v "$PWD/runs:/work/runs" turnwise train
#   docker build --build-arg BASE=pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime -t turnwise-gpu .
#   docker run --rm --gpus all turnwise-gpu train --model /models/mine
ARG BASE=python:3.12-slim
FROM ${BASE}
# the CPU kernels are compiled on first use
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE constraints.txt /source/
COPY src /source/src
# a base image with torch keeps its own; otherwise the version that the figures were measured with
RUN python -c 'import torch' 2>/dev/null \
      && python -m pip install --no-cache-dir '/source[agents,data,rewards]' \
      || python -m pip install --no-cache-dir -c /source/constraints.txt '/source[agents,data,rewards]'
RUN useradd --create-home --uid 1000 turnwise && mkdir /work && chown turnwise /work
USER turnwise
WORKDIR /work
ENTRYPOINT ["turnwise"]
CMD ["train"]
