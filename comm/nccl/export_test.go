package nccl

import "testing"

// Chunk has so many bytes come from each rank at a time, for a test.
func Chunk(t *testing.T, bytes int64) {
	before := mostChunk
	mostChunk = bytes
	t.Cleanup(func() { mostChunk = before })
}
