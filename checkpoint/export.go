package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// Stat looks at a folder that is a checkpoint itself: by its canonical name, by a
// manifest that can be read, or by what is left of one: ranks' files, or a manifest that
// was ours before it was damaged.
func Stat(folder string) (Entry, bool) {
	abs, err := filepath.Abs(folder)
	if err != nil {
		return Entry{}, false
	}
	e := Entry{Name: filepath.Base(abs), Folder: folder}
	step, copy, canonical := parseName(e.Name)
	if e.Manifest, e.Err = ReadManifest(folder); e.Err != nil && !canonical && !remains(folder) {
		return Entry{}, false
	}
	if e.Step, e.Copy = step, copy; !canonical {
		e.Step, e.Copy = e.Manifest.Step, 1
	} else if e.Err == nil {
		e.Err = e.agrees()
	}
	return e, true
}

// remains tells whether a folder without a manifest that can be read was a checkpoint: a
// model's folder may have a manifest.json of another kind.
func remains(folder string) bool {
	entries, err := filesys.ReadDir(folder)
	if err != nil {
		return false
	}
	for _, e := range entries {
		if partName.MatchString(e.Name()) {
			return true
		}
	}
	text, err := filesys.ReadFile(filepath.Join(folder, manifestName), maxManifest)
	return err == nil && bytes.Contains(text, []byte(sumKey)) && bytes.Contains(text, []byte(`"plan_hash"`))
}

// Export copies files of a checkpoint into a new folder, which appears complete and
// synced or not at all; an empty one may be there already. What is copied is
// verified once more on its way. Weights of over shardBytes are split into files of
// up to that, with an index.
func Export(ctx context.Context, folder, to string, shardBytes int64, names ...string) error {
	m, err := ReadManifest(folder)
	if err != nil {
		return err
	}
	to, err = filepath.Abs(to)
	if err != nil {
		return fmt.Errorf("export: %w", err)
	}
	if _, err := filesys.MakeFolder(filepath.Dir(to)); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	temp := filepath.Join(filepath.Dir(to), "."+filepath.Base(to)+".writing-"+random())
	err = filesys.Mkdir(temp, 0o777)
	for _, name := range names {
		if err != nil {
			break
		}
		want, ok := m.file(name)
		if name == safetensors.FileName && m.Version >= sharded {
			err = exportWeights(ctx, folder, temp, shardBytes)
			continue
		}
		if !ok {
			err = fmt.Errorf("%w: %s lists no %s", ErrDamaged, folder, name)
			break
		}
		if name == safetensors.FileName && want.Bytes > shardBytes {
			err = want.shard(ctx, folder, temp, shardBytes)
		} else {
			err = want.copy(ctx, folder, temp)
		}
	}
	if err == nil {
		err = filesys.SyncDir(temp)
	}
	if err == nil {
		_ = filesys.Remove(to) // an empty folder gives way; the renaming says what else is there
		err = filesys.RenameNew(temp, to)
	}
	if err != nil {
		return fmt.Errorf("export %s: %w", folder, errors.Join(err, filesys.RemoveAll(temp)))
	}
	return filesys.SyncDir(filepath.Dir(to))
}

// exportWeights writes the parameters of ranks' files as whole tensors in fp32.
func exportWeights(ctx context.Context, from, to string, shardBytes int64) error {
	r, err := OpenState(from, ModelState)
	if err != nil {
		return err
	}
	groups, _ := shards(r.Tensors(), shardBytes)
	if len(groups) > 1 {
		err = shard(ctx, r, to, shardBytes)
	} else {
		err = writeTensors(ctx, r, filepath.Join(to, safetensors.FileName), r.Tensors())
	}
	return errors.Join(err, r.Close())
}

func (want File) copy(ctx context.Context, from, to string) error {
	out, err := filesys.OpenFile(filepath.Join(to, want.Name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	err = want.read(ctx, from, out)
	return errors.Join(err, out.Sync(), out.Close())
}
