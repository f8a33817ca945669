package nccl

import "testing"

// Chunk sets, for a test, how many bytes each rank sends at a time.
func Chunk(t *testing.T, bytes int64) {
	before := mostChunk
	mostChunk = bytes
	t.Cleanup(func() { mostChunk = before })
}
