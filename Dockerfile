# The build host: checkpoints in, bundles out (edge-export), with everything to run and measure them too. Not for devices; without torch
# (parity, --calibrate) and without the compiler of --package.
#   docker build -t edge-mtp .
#   docker run --rm -v "$PWD:/work" edge-mtp TARGET_FOLDER DRAFTER_FOLDER --output my-bundle
#   docker run --rm -v "$PWD:/work" --entrypoint edge-run edge-mtp doctor
# It writes as user 1000; for a folder of someone else's: --user "$(id -u):$(id -g)" -e EDGE_MTP_CACHE=/tmp/edge-mtp
FROM python:3.12-slim-bookworm AS build

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake g++ ninja-build \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/edge-mtp
# llama.cpp is compiled for what every x86 machine with AVX2 has, not for the machine that builds the image; for Arm it reads none of
# these but GGML_NATIVE, which leaves plain Arm.
COPY requirements/runtime.txt /tmp/runtime.txt
RUN CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" \
    /opt/edge-mtp/bin/pip install --no-cache-dir --require-hashes --no-deps -r /tmp/runtime.txt
COPY . /tmp/edge-mtp
RUN /opt/edge-mtp/bin/pip install --no-cache-dir --no-deps /tmp/edge-mtp

FROM python:3.12-slim-bookworm

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 edge
COPY --from=build /opt/edge-mtp /opt/edge-mtp
ENV PATH=/opt/edge-mtp/bin:$PATH ORT_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_TELEMETRY=1
USER 1000
WORKDIR /work
ENTRYPOINT ["edge-export"]
CMD ["--help"]
