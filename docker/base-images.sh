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
# As long as one HTTP request may take that a registry in reach answers at once.
REACH_TIMEOUT_S=${REACH_TIMEOUT_S:-10}
REGISTRY=https://registry-1.docker.io/v2/
LABEL='LABEL org.paramserver.stand-in=true'

present() { docker image inspect "$1" >/dev/null 2>&1; }

# Whether the registry answers, asked once; without python3 here the pulls find out. 401 is an answer.
reached() {
    command -v python3 >/dev/null || return 0
    python3 - "$REGISTRY" "$REACH_TIMEOUT_S" <<'END'
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2]))
except urllib.error.HTTPError:
    pass
except OSError as error:
    sys.exit(f"{sys.argv[1]} cannot be reached ({error}): nothing is pulled")
END
}

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

# bootstrap DIRECTORY PACKAGES: a small Debian 12 with these packages.
bootstrap() {
    echo "making a small Debian 12 for the stand-ins"
    if ! debootstrap --variant=minbase --include="$2" bookworm "$1" >"$work/debootstrap.log" 2>&1; then
        tail -n 20 "$work/debootstrap.log" >&2
        echo "base-images.sh: debootstrap failed; is a Debian mirror in reach?" >&2
        exit 1
    fi
    # What is only needed on a machine that may lose power makes dpkg slow.
    echo force-unsafe-io >"$1/etc/dpkg/dpkg.cfg.d/stand-in"
}

# with DIRECTORY PACKAGE...: a copy of the small Debian, with further packages.
with() {
    local root=$1
    shift
    cp -a "$work/debian" "$root"
    if ! DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get -qq install -y --no-install-recommends "$@" \
        >"$work/apt.log" 2>&1 </dev/null; then
        tail -n 20 "$work/apt.log" >&2
        echo "base-images.sh: ${*} could not be installed; is a Debian mirror in reach?" >&2
        exit 1
    fi
}

import() { # import DIRECTORY TAG CHANGE...: the directory as an image of one layer
    local directory=$1 tag=$2 changes=()
    shift 2
    # What no program needs.
    rm -rf "$directory"/usr/share/{doc,info,locale,man} "$directory"/var/cache/apt/* "$directory"/var/log/*
    rm -rf "$directory"/var/lib/apt/lists/*
    for change in "$LABEL" "$@"; do
        changes+=(--change "$change")
    done
    tar -C "$directory" -c . | docker import --message "stand-in for $tag" "${changes[@]}" - "$tag" >/dev/null
    echo "$tag: a stand-in, made of Debian packages"
}

make_debian() {
    local root=$work/debian
    bootstrap "$root" ca-certificates,python3,python3-pip,python3-venv
    ln -s /usr/bin/python3 "$root/usr/local/bin/python3"
    ln -s python3 "$root/usr/local/bin/python"
    ln -s /usr/bin/pip3 "$root/usr/local/bin/pip"
}

make_builder() {
    with "$work/builder" gcc libc6-dev
    import "$work/builder" "$BUILD_IMAGE" 'CMD ["python3"]'
}

make_store() {
    with "$work/store" redis-server
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
    present "$image" || missing+=("$image")
done
((${#missing[@]})) || exit 0
if reached; then
    absent=("${missing[@]}") missing=()
    for image in "${absent[@]}"; do
        pulled "$image" || missing+=("$image")
    done
    ((${#missing[@]})) || exit 0
fi

need debootstrap tar
((EUID == 0)) || { echo "base-images.sh: ${missing[*]} cannot be pulled, and making stand-ins takes root" >&2; exit 1; }
work=$(mktemp -d)
trap 'umount "$work" 2>/dev/null; rm -rf "$work"' EXIT
# Package managers wait for the disk after each file; memory needs no such wait.
mount -t tmpfs -o size=2g,mode=0700 tmpfs "$work" 2>/dev/null || true
make_debian # once: the three differ in a few packages
for image in "${missing[@]}"; do
    case $image in
        "$BUILD_IMAGE") make_builder ;;
        "$STORE_IMAGE") make_store ;;
    esac
done
case " ${missing[*]} " in # the last one, as the others are copies of it
    *" $PYTHON_IMAGE "*) import "$work/debian" "$PYTHON_IMAGE" 'CMD ["python3"]' ;;
esac
