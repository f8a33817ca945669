# The command in an image that has nothing else:
#
#   docker build -t spillway .
#   docker run --rm -u "$(id -u):$(id -g)" -v "$PWD:/work" spillway \
#       train --model gpt2 --data corpus --steps 10 --checkpoint run
#
# There is no Go toolchain in it, on whose source `train` alone would train. BASE
# must have glibc: the binary opens a driver's libraries at run time.
#
# On a machine with NVIDIA's container toolkit, add --gpus all: the driver comes
# from the host, NVRTC and cuBLASLt from an image with CUDA's libraries, given as
# --build-arg BASE=….
ARG BASE=debian:bookworm-slim

FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /spillway ./cmd/spillway

FROM ${BASE}
COPY --from=build /spillway /usr/local/bin/spillway
COPY LICENSE /usr/share/doc/spillway/LICENSE
WORKDIR /work
ENTRYPOINT ["spillway"]
