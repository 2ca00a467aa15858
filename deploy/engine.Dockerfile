# The engine: takes token ids, returns token ids.
# Build from the repository's root: docker build -f deploy/engine.Dockerfile .
FROM python:3.12-slim AS build

# cpu, or gpu for CUDA and Triton: constraints-cpu.txt or constraints-gpu.txt chooses torch.
ARG DEVICE=cpu
# An index that offers CPU builds of torch makes a much smaller image.
ARG PIP_EXTRA_INDEX_URL=""

WORKDIR /src
COPY constraints.txt constraints-cpu.txt constraints-gpu.txt ./
RUN python -m venv /opt/octavo \
    && /opt/octavo/bin/pip install --no-cache-dir \
        -c constraints.txt -c "constraints-${DEVICE}.txt" torch
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY services services
COPY models models
RUN /opt/octavo/bin/pip install --no-cache-dir \
        -c constraints.txt -c "constraints-${DEVICE}.txt" \
        ".[${DEVICE},tracing,gateway]" \
    # Programs and modules that only tests of torch, sympy and networkx run, and pip: 260 MB.
    && rm -rf /opt/octavo/lib/python3*/site-packages/torch/test \
    && find /opt/octavo/lib/python3*/site-packages/torch/bin \
        -type f ! -name torch_shm_manager -delete \
    && find /opt/octavo/lib/python3*/site-packages/sympy \
        /opt/octavo/lib/python3*/site-packages/networkx \
        -type d -name tests -prune -exec rm -rf {} + \
    && /opt/octavo/bin/pip uninstall --yes pip

FROM python:3.12-slim
# Triton and Inductor build what they launch with a C and C++ compiler, when the engine starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    # The compiler's optimizer of whole programs and its sanitizers, which nothing calls: 90 MB.
    && find /usr/bin /usr/lib /usr/libexec \
        \( -name lto1 -o -name '*-lto-dump-*' -o -name 'lib*san.*' \) -delete
RUN useradd --create-home --uid 10001 octavo \
    # A volume that is mounted here begins with this owner.
    && install -d -o octavo -g octavo /home/octavo/.cache
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1
USER 10001
EXPOSE 50051
HEALTHCHECK --interval=5s --timeout=10s --start-period=10m --retries=3 \
    CMD ["octavo", "health", "127.0.0.1:50051"]
ENTRYPOINT ["octavo"]
CMD ["engine", "--host", "0.0.0.0", "--port", "50051"]
