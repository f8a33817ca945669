module github.com/spillway-ml/spillway/examples/own-model

go 1.26

require github.com/spillway-ml/spillway v0.0.0

require (
	github.com/NVIDIA/go-nvml v0.13.0-1 // indirect
	github.com/andybalholm/brotli v1.1.0 // indirect
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/dgraph-io/ristretto/v2 v2.2.0 // indirect
	github.com/dlclark/regexp2 v1.11.5 // indirect
	github.com/docker/go-units v0.5.0 // indirect
	github.com/dustin/go-humanize v1.0.1 // indirect
	github.com/ebitengine/purego v0.11.0 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/klauspost/compress v1.18.0 // indirect
	github.com/mitsuhiko/minijinja/minijinja-go/v2 v2.22.0 // indirect
	github.com/parquet-go/parquet-go v0.25.1 // indirect
	github.com/pierrec/lz4/v4 v4.1.21 // indirect
	github.com/tiktoken-go/tokenizer v0.7.0 // indirect
	golang.org/x/sys v0.38.0 // indirect
	golang.org/x/text v0.25.0 // indirect
)

replace github.com/spillway-ml/spillway => ../..
