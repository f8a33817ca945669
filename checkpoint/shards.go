package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// ShardBytes is the size above which Hugging Face's own writer splits weights.
const ShardBytes = 5_000_000_000

// shards groups tensors, in order, into files of at most limit bytes each. A larger tensor has a
// separate file.
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

// shard writes weights as several files with an index in Hugging Face's layout:
// model-00001-of-00003.safetensors …
func shard(ctx context.Context, r Tensors, to filesys.Folder, limit int64) error {
	groups, total := shards(r.Tensors(), limit)
	where := map[string]string{}
	for i, tensors := range groups {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(groups))
		if err := writeTensors(ctx, r, to, name, tensors); err != nil {
			return err
		}
		for _, t := range tensors {
			where[t.Name] = name
		}
	}
	index, err := json.MarshalIndent(map[string]any{"metadata": map[string]any{"total_size": total}, "weight_map": where}, "", "  ")
	if err != nil {
		return err
	}
	return writeSynced(to, safetensors.IndexName, append(index, '\n'))
}

// writeTensors copies tensors, as fp32, into a new file of a folder.
func writeTensors(ctx context.Context, r Tensors, to filesys.Folder, name string, tensors []safetensors.Tensor) error {
	tensors = slices.Clone(tensors)
	for i := range tensors {
		tensors[i].DType = safetensors.F32
	}
	f, err := to.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	w, err := safetensors.CreateAs(f.Name(), f, tensors, nil)
	if err != nil {
		return errors.Join(err, f.Close())
	}
	chunk := make([]float32, ChunkElems)
	for _, t := range w.Tensors() {
		if err := copyTensor(ctx, r, w, t, chunk); err != nil {
			w.Abort()
			return err
		}
	}
	return w.Commit()
}

func copyTensor(ctx context.Context, r Tensors, w *safetensors.Writer, t safetensors.Tensor, chunk []float32) error {
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
