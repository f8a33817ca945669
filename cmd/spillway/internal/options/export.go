package options

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/outputs"
)

// within reports whether path is, or would be, inside the folder dir.
func within(path, dir string) (bool, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return false, err
	}
	folder, err := os.Stat(dir)
	if err != nil {
		return false, err
	}
	for at := filepath.Dir(abs); ; at = filepath.Dir(at) {
		if st, err := os.Stat(at); err == nil && os.SameFile(st, folder) {
			return true, nil
		}
		if at == filepath.Dir(at) {
			return false, nil
		}
	}
}

// Exportable checks the folder to, which a flag names for a model made from the folder from. It
// must be new or empty, and outside from.
func Exportable(flag, to, from string) error {
	if inside, err := within(to, from); err != nil || inside {
		return cmp.Or(err, fmt.Errorf("--%s %.80q lies in %.80q; give a folder elsewhere", flag, to, from))
	}
	among := outputs.CheckStored([]outputs.Path{{Name: "--" + flag, Path: to}}, []outputs.Path{{Name: "the folder", Path: from}})
	return cmp.Or(among, empty(flag, to))
}

// empty rejects a folder that contains files.
func empty(flag, to string) error {
	if left, err := os.ReadDir(to); err == nil && len(left) > 0 {
		return fmt.Errorf("--%s %.80q is not empty (%.80q is there); give a new folder", flag, to, left[0].Name())
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	return nil
}

// refuseExport rejects train's --export before the run begins if there are no checkpoints, or if
// the folder overlaps with their folder or another output.
func (l *Later) refuseExport(c *config.Config) error {
	switch {
	case l.Export == "":
		return nil
	case c.Checkpoint == "":
		return fmt.Errorf("--export %.80q without --checkpoint: what is exported is the run's last checkpoint; give --checkpoint DIR", l.Export)
	}
	for _, other := range []struct{ flag, path string }{{"checkpoint", c.Checkpoint}, {"metrics", c.Metrics}, {"receipt", c.Receipt}, {"trace", c.Trace}, {"tensorboard", c.TensorBoard}, {"disk", c.Disk}} {
		if other.path != "" && (below(other.path, l.Export) || other.flag == "checkpoint" && below(l.Export, other.path)) {
			return fmt.Errorf("--export %.80q and --%s %.80q: one lies in the other; give a folder elsewhere", l.Export, other.flag, other.path)
		}
	}
	for _, in := range []struct{ flag, path string }{{"data", c.Data}, {"eval-data", c.EvalData}} {
		if in.path != "" && below(l.Export, in.path) {
			return fmt.Errorf("--export %.80q would lie in %.80q, which --%s reads; give a folder elsewhere", l.Export, in.path, in.flag)
		}
	}
	if _, err := os.Stat(c.Checkpoint); err != nil {
		return empty("export", l.Export)
	}
	return Exportable("export", l.Export, c.Checkpoint)
}

// RoomToExport checks that the folder of --export can be created. The process that exports calls
// it.
func (l *Later) RoomToExport() error {
	if l.Export == "" {
		return nil
	}
	abs, err := filepath.Abs(l.Export)
	if err != nil {
		return fmt.Errorf("--export: %w", err)
	}
	beside := filepath.Dir(abs)
	if err := os.MkdirAll(beside, 0o777); err != nil {
		return fmt.Errorf("--export: %w", err)
	}
	probe, err := os.MkdirTemp(beside, ".spillway-")
	if err == nil {
		err = os.Remove(probe)
	}
	if err != nil {
		return fmt.Errorf("--export: %w", err)
	}
	return nil
}

// below reports whether a path is dir or below it, judged by their names.
func below(path, dir string) bool {
	a, err := filepath.Abs(path)
	if err != nil {
		return false
	}
	b, err := filepath.Abs(dir)
	if err != nil {
		return false
	}
	rel, err := filepath.Rel(b, a)
	return err == nil && filepath.IsLocal(rel)
}
