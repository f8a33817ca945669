package saving

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/regular"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/model"
)

// refuseModelFolder refuses checkpoints in a model's folder or below it. A user who names that
// folder as a model would get the model's weights, not the trained ones.
func refuseModelFolder(c *config.Config) error {
	at := c.Checkpoint // or the lowest existing folder above it
	for _, err := os.Stat(at); err != nil; _, err = os.Stat(at) {
		above, name := filesys.Above(at)
		if name == "" {
			return nil // nothing can be created there; opening the folder reports the error
		}
		at = above
	}
	at, err := filepath.EvalSymlinks(at)
	if err == nil {
		at, err = filepath.Abs(at)
	}
	if err == nil {
		at, err = filepath.EvalSymlinks(at) // the working folder's path may have links
	}
	if err != nil {
		return fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, err)
	}
	for dir := at; ; dir = filepath.Dir(dir) {
		if isModel(dir) {
			return config.Refuse("Config.Checkpoint %s: %s is a model's folder; give a folder outside it, and move checkpoints that are there already (step-*, .spillway-marks) to resume from them", c.Checkpoint, dir)
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}

// isModel tells whether a folder holds a model of any architecture, or adapters.
func isModel(dir string) bool {
	for name, key := range map[string]string{model.ConfigFile: "model_type", lora.ConfigFile: "peft_type"} {
		f, err := regular.Open(filepath.Join(dir, name))
		if err != nil {
			continue
		}
		var keys map[string]json.RawMessage
		err = json.NewDecoder(io.LimitReader(f, 1<<20)).Decode(&keys)
		_ = f.Close() // read only
		if err == nil && keys[key] != nil {
			return true
		}
	}
	return false
}
