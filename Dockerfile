# The command in an image that has nothing else:
#
#   docker build -t spillway .
#   docker run --rm -v "$PWD:/work" spillway train --model gpt2 --data corpus
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
