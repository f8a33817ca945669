package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"github.com/spillway-ml/spillway/internal/safetensors"
)

// ShardBytes is the size above which Hugging Face's own writer splits weights.
const ShardBytes = 5_000_000_000

// shards groups tensors, in order, into files of at most limit bytes each; a tensor
// that is larger has a file of its own.
func shards(tensors []safetensors.Tensor, limit int64) (groups [][]safetensors.Tensor, total int64) {
	room := int64(0)
	for _, t := range tensors {
		n := t.Elements() * 4
		if len(groups) == 0 || n > room {
			groups, room = append(groups, nil), limit
		}
		last := len(groups) - 1
		groups[last] = append(groups[last], t)
		room -= n
		total += n
	}
	return groups, total
}

// shard writes the weights of a checkpoint as several files with an index, as
// Hugging Face's loaders take them: model-00001-of-00003.safetensors …
func (want File) shard(ctx context.Context, from, to string, limit int64) error {
	if err := want.read(ctx, from, io.Discard); err != nil { // verified before it is taken apart
		return err
	}
	r, err := safetensors.Open(filepath.Join(from, want.Name))
	if err != nil {
		return err
	}
	defer r.Close()
	groups, total := shards(r.Tensors(), limit)
	where := map[string]string{}
	chunk := make([]float32, 1<<18)
	for i, tensors := range groups {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(groups))
		w, err := safetensors.Create(filepath.Join(to, name), tensors, nil)
		if err != nil {
			return err
		}
		for _, t := range tensors {
			where[t.Name] = name
			if err := copyTensor(ctx, r, w, t, chunk); err != nil {
				w.Abort()
				return err
			}
		}
		if err := w.Commit(); err != nil {
			return err
		}
	}
	index, err := json.MarshalIndent(map[string]any{"metadata": map[string]any{"total_size": total}, "weight_map": where}, "", "  ")
	if err != nil {
		return err
	}
	return writeSynced(filepath.Join(to, safetensors.IndexName), append(index, '\n'))
}

func copyTensor(ctx context.Context, r *safetensors.Reader, w *safetensors.Writer, t safetensors.Tensor, chunk []float32) error {
	for at := int64(0); at < t.Elements(); {
		if err := ctx.Err(); err != nil {
			return err
		}
		v := chunk[:min(int64(len(chunk)), t.Elements()-at)]
		if err := errors.Join(r.ReadFloat32(t.Name, at, v), w.WriteFloat32(t.Name, at, v)); err != nil {
			return err
		}
		at += int64(len(v))
	}
	return nil
}
