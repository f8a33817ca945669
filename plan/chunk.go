package plan

import (
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload"
)

// chunksOfUnit is the largest number of chunks in which a unit's states pass through host
// memory. It bounds the program's size: at stage 0 of a 405B model, chunks of the default size
// make a million operations.
const chunksOfUnit = 64

// OffloadChunk returns offload.Options.Chunk for a model's forward program, 0 for the
// default.
func OffloadChunk(p *graph.Program, c Config) int64 {
	units := make([]int64, len(p.Units))
	for i := range p.Params {
		units[p.Params[i].Unit] += p.Params[i].Elems()
	}
	shards := int64(1)
	if c.Stage.ShardsStates() {
		shards = int64(c.shardSize())
	}
	const multiple = 1024 // offload.Options.Chunk's
	chunk := (slices.Max(units)/shards/chunksOfUnit + multiple - 1) / multiple * multiple
	if chunk <= offload.DefaultChunk {
		return 0
	}
	return chunk
}
