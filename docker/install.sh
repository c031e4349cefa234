#!/usr/bin/env bash
# What the stages of the Dockerfile run: install.sh torch | dependencies | project in one environment, in this order;
# install.sh compiler | wheel in another one.
set -euo pipefail

ENVIRONMENT=/opt/paramserver
PYTHON=$ENVIRONMENT/bin/python
VARIANT=${VARIANT:-cpu}
KERNELS=${KERNELS:-yes}
HASHES=${HASHES:-yes}
EXTRAS=(dashboard demo)
NO_TORCH='hashes.txt knows torch for CPUs of one platform. For another one, with an index for this torch, run make \
docker-hashes; or do without the comparison: --build-arg HASHES=no'
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# pip ARGUMENTS: with docker/wheels alone if that is enough, else with the index as well.
pip_install() {
    local pip=(python3 -m pip --python "$PYTHON" install --quiet --only-binary :all: --find-links docker/wheels)
    if compgen -G 'docker/wheels/*.whl' >/dev/null; then
        PIP_INDEX_URL='' PIP_EXTRA_INDEX_URL='' PIP_NO_INDEX=1 "${pip[@]}" "$@" && return
        echo 'install.sh: docker/wheels is not enough, asking the index for the rest' >&2
        pip+=(--retries 1)
    fi
    "${pip[@]}" "$@"
}

constraints() {
    # torch is what the base image brings, whatever its version.
    if [[ $VARIANT == gpu ]]; then grep -v '^torch==' constraints.txt; else cat constraints.txt; fi
}

# locked WHAT: the lines of hashes.txt about torch, or about all others.
locked() {
    awk -v torch="$([[ $1 == torch ]] && echo 1 || echo 0)" \
        '/^[A-Za-z]/ { keep = (/^torch==/ ? 1 : 0) == torch } /^[A-Za-z ]/ && keep' docker/hashes.txt
}

# Tests, C++ headers and test programs of other packages: a third of their size, and nobody runs them here.
strip_packages() {
    local packages
    packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$packages"/torch/{include,test,share/cmake}
    find "$packages"/torch/bin -mindepth 1 ! -name torch_shm_manager -delete 2>/dev/null || true
    find "$packages" -type d -name tests -prune -exec rm -rf {} +
}

fail() { # fail EXIT-CODE SENTENCE
    echo "install.sh: $2" >&2
    exit "$1"
}

install_compiler() {
    local apt=(apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
    command -v apt-get >/dev/null || return 1
    "${apt[@]}" update && DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends gcc libc6-dev
}

case ${1:-} in
    torch)
        case $VARIANT in
            cpu | gpu) ;;
            *) fail 2 "VARIANT is \"$VARIANT\", but must be cpu or gpu" ;;
        esac
        case $HASHES in
            yes | no) ;;
            *) fail 2 "HASHES is \"$HASHES\", but must be yes or no" ;;
        esac
        # No pip inside: that of the base image does the work. What the base image has installed can be seen.
        python3 -m venv --without-pip --system-site-packages "$ENVIRONMENT"
        constraints >/build/limits.txt
        # Alone and first: if it is the wrong torch, then before its gigabytes of CUDA libraries are fetched.
        if [[ $VARIANT == cpu && $HASHES == yes ]]; then
            locked torch >locked.txt
            pip_install --no-deps --require-hashes -r locked.txt || fail 1 "$NO_TORCH"
        elif [[ $VARIANT == cpu ]]; then
            pip_install --no-deps -c limits.txt torch
        fi
        "$PYTHON" docker/check_torch.py "$VARIANT"
        ;;
    dependencies)
        if [[ $HASHES == yes ]]; then
            locked others >locked.txt
            pip_install --no-deps --require-hashes -r locked.txt
        else
            python3 docker/requirements.py "${EXTRAS[@]}" >requirements.txt
            pip_install -c limits.txt -r requirements.txt
        fi
        "$PYTHON" docker/check_torch.py "$VARIANT"
        strip_packages
        ;;
    compiler)
        case $KERNELS in
            yes) ;;
            no) exit ;;
            *) fail 2 "KERNELS is \"$KERNELS\", but must be yes or no" ;;
        esac
        command -v cc >/dev/null || install_compiler || fail 1 "BUILD_IMAGE has no C compiler, and apt-get could not \
install one. Give an image that has one: --build-arg BUILD_IMAGE=python:3.11. Or do without the compiled arithmetic, with \
which servers are up to twice as fast: --build-arg KERNELS=no"
        ;;
    wheel)
        # Building the wheel takes hatchling, which pip puts into an environment of its own.
        if compgen -G 'docker/wheels/hatchling-*.whl' >/dev/null; then
            export PIP_NO_INDEX=1 PIP_FIND_LINKS=/build/docker/wheels
        fi
        [[ $KERNELS == yes ]] || export CC=false
        PIP_CONSTRAINT=/build/constraints.txt \
            python3 -m pip wheel --verbose --no-deps --wheel-dir dist . >wheel.log 2>&1 \
            || { tail -n 30 wheel.log >&2 && fail 1 'the wheel could not be built'; }
        [[ $KERNELS == no ]] || ! compgen -G 'dist/*-none-any.whl' >/dev/null \
            || fail 1 "$(grep -o 'paramserver is installed without.*' wheel.log || echo 'nothing was compiled')"
        ;;
    project)
        python3 -m pip --python "$PYTHON" install --quiet --no-deps --no-index --ignore-installed --prefix /project dist/*.whl
        ;;
    *)
        fail 2 'say torch, dependencies, compiler, wheel or project'
        ;;
esac
