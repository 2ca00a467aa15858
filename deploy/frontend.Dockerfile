# The frontend and the command line: text in, text out. No torch.
# Build from the repository's root: docker build -f deploy/frontend.Dockerfile .
FROM python:3.12-slim AS build

WORKDIR /src
RUN python -m venv /opt/octavo
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY protos protos
COPY services services
COPY models models
RUN /opt/octavo/bin/pip install --no-cache-dir -c constraints.txt ".[frontend,tracing]" \
    && /opt/octavo/bin/pip uninstall --yes pip

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 octavo
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1
USER 10001
EXPOSE 50050 8000
HEALTHCHECK --interval=5s --timeout=10s --start-period=1m --retries=3 \
    CMD ["octavo", "health", "127.0.0.1:50050", "--http-port", "8000"]
ENTRYPOINT ["octavo"]
CMD ["frontend", "--host", "0.0.0.0", "--port", "50050", "--http-port", "8000"]
