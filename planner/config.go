package planner

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/internal/regular"
	"github.com/spillway-ml/spillway/model"
)

// maxConfigBytes bounds the size of a config.json; real ones are below 10 KB.
const maxConfigBytes = 1 << 20

// ReadConfig reads the config.json at path, or in the folder at path. Errors name
// the file and the key.
func ReadConfig(path string) (model.Config, error) {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		path = filepath.Join(path, model.ConfigFile)
	}
	data, err := readLimited(path)
	if err != nil {
		return model.Config{}, err
	}
	c, err := model.Parse(data)
	if err != nil {
		return model.Config{}, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

func readLimited(path string) ([]byte, error) {
	// Stat before opening: opening a pipe would wait for its writer.
	st, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read model config: %s does not exist; a model folder holds a Hugging Face %s", path, model.ConfigFile)
	}
	if err != nil {
		return nil, fmt.Errorf("read model config: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("read model config: %s is not a regular file", path)
	}
	f, err := regular.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read model config: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfigBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read model config: %w", err)
	}
	if len(data) > maxConfigBytes {
		return nil, fmt.Errorf("read model config: %s is over %d bytes; a %s is a few KB", path, maxConfigBytes, model.ConfigFile)
	}
	return data, nil
}
