# A server for one model, on the CPU. Build it in the repository; the model is mounted at /model.
# It writes to /tmp only, so the rest of the file system may be read-only (docs/serving.md).
#
#     docker build -t vitrail .
#     docker run --rm --init --read-only --tmpfs /tmp -p 8000:8000 -e VITRAIL_TOKEN=change-me \
#         -v "$PWD/runs/pictures:/model:ro" vitrail

# Pinned by digest; to refresh it, run `docker pull python:3.12-slim` and copy the digest it prints.
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea

WORKDIR /build
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src

# torch first and from its own index, whose CPU builds are a tenth of the size; its dependencies
# come with the rest, because that index need not have every version that is pinned.
RUN pip install --no-cache-dir --constraint constraints.txt --no-deps \
        --index-url https://download.pytorch.org/whl/cpu torch \
    && pip install --no-cache-dir --constraint constraints.txt '.[serve,export,fast]' \
    && rm -rf /build

RUN useradd --create-home --uid 10001 vitrail
USER vitrail
WORKDIR /home/vitrail
ENV VITRAIL_CACHE=/tmp/vitrail

EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

ENTRYPOINT ["vitrail", "serve"]
CMD ["/model", "--host", "0.0.0.0", "--log", "json"]
