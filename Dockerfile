# The operator's image: Python, what requirements/operator.txt names, and the distributions `aerie-operator` and `aerie-vllm`, which the
# operator delivers to engines. No shell, no package manager, no root; it writes no file.
#
#   docker build -t registry.example/aerie:0.1.0 .
#
# There is no container engine where Aerie is developed, so this file as a whole has never been built. What was tried without
# one: its pip commands by hand, in a folder with Python 3.11, and that every pin has a wheel for 3.13.
# tests/unit/chart/test_image.py builds the wheels from exactly the files that are copied here and looks into them.
#
# Both stages have the same Debian and so the same Python (3.13). For a build that can be repeated give both by digest:
# --build-arg BUILD=debian@sha256:... --build-arg RUNTIME=gcr.io/distroless/python3-debian13@sha256:...
ARG BUILD=debian:trixie-slim
ARG RUNTIME=gcr.io/distroless/python3-debian13:nonroot

FROM ${BUILD} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /builder && python3 -m venv --without-pip /venv
WORKDIR /source
COPY requirements/build.txt requirements/operator.txt requirements/
RUN /builder/bin/pip install --require-hashes --only-binary :all: -r requirements/build.txt \
    && /builder/bin/pip --python /venv/bin/python install --require-hashes --only-binary :all: -r requirements/operator.txt
COPY pyproject.toml README.md LICENSE ./
COPY operator/aerie operator/aerie
COPY plugin plugin
RUN /builder/bin/pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheel . ./plugin \
    && /builder/bin/pip --python /venv/bin/python install --no-deps --no-index /wheel/*.whl

FROM ${RUNTIME}
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY --from=build /venv /venv
USER 65532:65532
ENTRYPOINT ["/venv/bin/aerie"]
