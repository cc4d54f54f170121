# The build host: checkpoints in, bundles out (edge-export), with everything to run and measure them too. Not for devices; without torch
# (parity, --calibrate) and without the compilers that packages with llama.cpp need.
#   docker build -t edge-mtp .
#   docker run --rm -v "$PWD:/work" edge-mtp TARGET_FOLDER DRAFTER_FOLDER --output my-bundle
#   docker run --rm -v "$PWD:/work" --entrypoint edge-run edge-mtp doctor
# It writes as user 1000; for a folder of someone else's: --user "$(id -u):$(id -g)" -e EDGE_MTP_CACHE=/tmp/edge-mtp
# Everything is taken by its hash: the image by its digest, which the tag had on 25 August 2026 (docker-library/repo-info), and what is
# installed by the locks. Move both FROM lines together.
FROM python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579 AS build

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY requirements /tmp/requirements
# What builds stays in this stage.
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes --no-deps -r /tmp/requirements/build.txt -r /tmp/requirements/llama.txt
ENV PATH=/opt/build/bin:$PATH
# llama.cpp is compiled for what every x86 machine with AVX2 has, not for the machine that builds the image; for Arm it reads none of
# these but GGML_NATIVE, which leaves plain Arm.
RUN CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" \
    pip wheel --no-cache-dir --no-build-isolation --require-hashes --no-deps -r /tmp/requirements/runtime.txt --wheel-dir /tmp/wheels
COPY . /tmp/edge-mtp
WORKDIR /tmp/edge-mtp
# With the row kernels of every platform, as device packages are made here too.
RUN EDGE_MTP_KERNELS_FOR=all hatchling build --target wheel --directory /tmp/wheels \
    && python -m venv /opt/edge-mtp \
    && /opt/edge-mtp/bin/pip install --no-cache-dir --no-index --no-deps /tmp/wheels/*.whl

FROM python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579

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
