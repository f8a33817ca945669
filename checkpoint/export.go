package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/internal/aside"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// Exporting selects the files that Export writes.
type Exporting struct {
	Files []string // names of files of the checkpoint; safetensors.FileName: its weights, in fp32
	Blobs []Blob   // small files beside them
	// Weights is the name of the weights file; "" means safetensors.FileName. Weights of over
	// ShardBytes are split into files of at most that size, with an index.
	Weights    string
	ShardBytes int64
	// View selects or changes the weights that are written; nil writes all as they are.
	View func(Tensors) (Tensors, error)
}

// Export copies files of a checkpoint into the new folder to, which appears complete and synced
// or not at all. An empty folder may exist there already. All copied data is verified again
// while it is copied.
func (c *Checkpoint) Export(ctx context.Context, to string, what Exporting) (err error) {
	to, err = filepath.Abs(to)
	if err != nil {
		return fmt.Errorf("export: %w", err)
	}
	beside, made, err := filesys.MakeFolder(filesys.System, filepath.Dir(to))
	if err != nil {
		return fmt.Errorf("export: %w", err)
	}
	defer func() { made.Stay(); err = errors.Join(err, beside.Close()) }()
	name := filepath.Base(to)
	temp := aside.TempName()
	err = beside.Mkdir(temp, 0o777)
	if err == nil {
		err = c.exportInto(ctx, beside, temp, what)
	}
	if err == nil {
		_ = beside.Remove(name) // removes an empty folder; RenameNew reports anything else
		err = beside.RenameNew(temp, name)
	}
	if err != nil {
		return fmt.Errorf("export %s: %w", c.Folder, errors.Join(err, filesys.RemoveAll(beside, temp)))
	}
	return beside.Sync()
}

func (c *Checkpoint) exportInto(ctx context.Context, beside filesys.Folder, temp string, x Exporting) error {
	to, err := beside.Sub(temp)
	if err != nil {
		return err
	}
	for _, b := range x.Blobs {
		if err := writeSynced(to, b.Name, b.Data); err != nil {
			return errors.Join(err, to.Close())
		}
	}
	for _, name := range x.Files {
		want, ok := c.Manifest.file(name)
		switch {
		case name == safetensors.FileName && (c.Manifest.Version >= sharded || want.Bytes > x.ShardBytes || x.View != nil):
			err = c.exportWeights(ctx, want, to, x)
		case !ok:
			err = fmt.Errorf("%w: %s lists no %s", ErrDamaged, c.Folder, name)
		default:
			err = c.copyTo(ctx, want, to)
		}
		if err != nil {
			return errors.Join(err, to.Close())
		}
	}
	return errors.Join(to.Sync(), to.Close())
}

// exportWeights writes the parameters as whole tensors in fp32. A file of whole tensors is
// verified before it is split.
func (c *Checkpoint) exportWeights(ctx context.Context, want File, to filesys.Folder, x Exporting) (err error) {
	if c.Manifest.Version < sharded {
		if err := c.copy(ctx, want, io.Discard); err != nil {
			return err
		}
	}
	r, err := c.State(ModelState)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	of := r
	if x.View != nil {
		if of, err = x.View(r); err != nil {
			return err
		}
	}
	if groups, _ := shards(of.Tensors(), x.ShardBytes); x.Weights == "" && (len(groups) > 1 || c.Manifest.Version < sharded) {
		return shard(ctx, of, to, x.ShardBytes)
	}
	return writeTensors(ctx, of, to, cmp.Or(x.Weights, safetensors.FileName), of.Tensors())
}

func (c *Checkpoint) copyTo(ctx context.Context, want File, to filesys.Folder) error {
	out, err := to.OpenFile(want.Name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	err = c.copy(ctx, want, out)
	return errors.Join(err, out.Sync(), out.Close())
}
