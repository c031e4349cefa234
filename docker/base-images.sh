#!/usr/bin/env bash
# Stand-ins for the base images, for machines that reach no image registry. Only the tests of docker-compose use
# this (`make test-compose`): an image that is here, or can be pulled, is left as it is.
#
#   python:3.11-slim         Debian 12 with its Python 3.11, pip and venv
#   python:3.11              the same with a C compiler
#   valkey/valkey:9-alpine   Debian 12 with its Redis 7 under Valkey's names
#
# Needs root, a Debian mirror, and:  apt-get install docker.io docker-compose debootstrap
# To be rid of them:  docker rmi python:3.11-slim python:3.11 valkey/valkey:9-alpine
set -euo pipefail

PYTHON_IMAGE=python:3.11-slim
BUILD_IMAGE=python:3.11
STORE_IMAGE=valkey/valkey:9-alpine
PULL_TIMEOUT_S=${PULL_TIMEOUT_S:-120}
LABEL='LABEL org.paramserver.stand-in=true'

present() { docker image inspect "$1" >/dev/null 2>&1; }

pulled() {
    echo "$1: not here, trying to pull it"
    timeout "$PULL_TIMEOUT_S" docker pull --quiet "$1" 2>&1
}

need() {
    local missing=()
    for tool in "$@"; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    if ((${#missing[@]})); then
        echo "base-images.sh: not found: ${missing[*]}; run: apt-get install docker.io docker-compose debootstrap" >&2
        exit 1
    fi
}

# bootstrap DIRECTORY PACKAGES: a small Debian 12 with these packages, without what no program needs.
bootstrap() {
    if ! debootstrap --variant=minbase --include="$2" bookworm "$1" >"$work/debootstrap.log" 2>&1; then
        tail -n 20 "$work/debootstrap.log" >&2
        echo "base-images.sh: debootstrap failed; is a Debian mirror in reach?" >&2
        exit 1
    fi
    rm -rf "$1"/usr/share/{doc,info,locale,man} "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/var/log/*
}

import() { # import DIRECTORY TAG CHANGE...: the directory as an image of one layer
    local directory=$1 tag=$2 changes=()
    shift 2
    for change in "$LABEL" "$@"; do
        changes+=(--change "$change")
    done
    tar -C "$directory" -c . | docker import --message "stand-in for $tag" "${changes[@]}" - "$tag" >/dev/null
    echo "$tag: a stand-in, made of Debian packages"
}

make_python() { # make_python TAG PACKAGE...: Python, and further packages
    local tag=$1 root=$work/${1//[:\/]/-} packages=ca-certificates,python3,python3-pip,python3-venv
    shift
    for package in "$@"; do
        packages+=,$package
    done
    bootstrap "$root" "$packages"
    ln -s /usr/bin/python3 "$root/usr/local/bin/python3"
    ln -s python3 "$root/usr/local/bin/python"
    ln -s /usr/bin/pip3 "$root/usr/local/bin/pip"
    import "$root" "$tag" 'CMD ["python3"]'
}

make_store() {
    bootstrap "$work/store" redis-server
    for tool in server cli benchmark check-aof check-rdb; do
        ln -s "/usr/bin/redis-$tool" "$work/store/usr/local/bin/valkey-$tool"
    done
    install -d -o 999 -g 999 "$work/store/data"
    import "$work/store" "$STORE_IMAGE" 'WORKDIR /data' 'VOLUME /data' 'EXPOSE 6379' 'CMD ["valkey-server"]'
}

need docker
docker info >/dev/null || { echo "base-images.sh: the Docker daemon does not answer; is it running?" >&2; exit 1; }
missing=()
for image in "$PYTHON_IMAGE" "$BUILD_IMAGE" "$STORE_IMAGE"; do
    present "$image" || pulled "$image" || missing+=("$image")
done
((${#missing[@]})) || exit 0

need debootstrap tar
((EUID == 0)) || { echo "base-images.sh: ${missing[*]} cannot be pulled, and making stand-ins takes root" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for image in "${missing[@]}"; do
    case $image in
        "$PYTHON_IMAGE") make_python "$image" ;;
        "$BUILD_IMAGE") make_python "$image" gcc libc6-dev ;;
        "$STORE_IMAGE") make_store ;;
    esac
done
