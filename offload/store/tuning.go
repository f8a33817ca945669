package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spillway-ml/spillway/internal/aside"
	"github.com/spillway-ml/spillway/internal/regular"
	"github.com/spillway-ml/spillway/internal/userdir"
)

// Tuning is a measurement of `spillway doctor` for one filesystem.
type Tuning struct {
	Block            int       `json:"block_bytes"`
	Depth            int       `json:"queue_depth"`
	ReadBytesPerSec  float64   `json:"read_bytes_per_second"`
	WriteBytesPerSec float64   `json:"write_bytes_per_second"`
	Measured         time.Time `json:"measured"`
}

// tuningFile is the content of doctor.json: measurements by filesystem.
type tuningFile struct {
	Disks map[string]Tuning `json:"disks"`
}

// TuningPath returns the path of the file with the measurements, in the user's configuration
// folder.
func TuningPath() (string, error) {
	dir, err := userdir.Config()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "spillway", "doctor.json"), nil
}

func readTunings() (tuningFile, string, error) {
	var f tuningFile
	path, err := TuningPath()
	if err != nil {
		return f, "", nil // without a home folder nothing was measured
	}
	text, err := regular.ReadFile(path, 16<<20)
	if errors.Is(err, os.ErrNotExist) {
		return f, path, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &f)
	}
	if err != nil {
		return tuningFile{}, path, fmt.Errorf("the measurements in %s can't be used (%v); measure the disk again", path, err)
	}
	return f, path, nil
}

// LoadTuning returns the measurement for the filesystem of a folder. It is the zero Tuning where
// there is none, or where Options would reject one of its values.
func LoadTuning(dir string) (Tuning, error) {
	f, _, err := readTunings()
	if err != nil {
		return Tuning{}, err
	}
	t := f.Disks[FilesystemOf(dir)]
	if t.Block < Page || t.Block > maxBlock || t.Block&(t.Block-1) != 0 || t.Depth < 1 || t.Depth > maxDepth {
		return Tuning{}, nil
	}
	return t, nil
}

// SaveTuning stores a measurement for the filesystem of a folder, and returns the path of the file
// that contains it. Measurements of other filesystems are kept.
func SaveTuning(dir string, t Tuning) (string, error) {
	f, path, err := readTunings()
	if path == "" {
		_, err := TuningPath()
		return "", fmt.Errorf("store the measurement: %w", err)
	}
	if err != nil {
		f = tuningFile{} // the file is damaged: replace it
	}
	if f.Disks == nil {
		f.Disks = map[string]Tuning{}
	}
	f.Disks[FilesystemOf(dir)] = t
	text, err := json.MarshalIndent(f, "", "  ")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o777)
	}
	if err == nil {
		err = aside.WriteBytes(path, append(text, '\n'), 0o600)
	}
	if err != nil {
		return path, fmt.Errorf("store the measurement: %w", err)
	}
	return path, nil
}
