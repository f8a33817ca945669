package saving

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
)

// refuseModelFolder refuses checkpoints in a model's folder or below it: who names the model
// would get its first weights, not the trained ones.
func refuseModelFolder(c *config.Config) error {
	abs, err := filepath.Abs(c.Checkpoint)
	if err != nil {
		return fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, err)
	}
	at := abs // or the lowest folder above it that is there
	for _, err := os.Stat(at); err != nil && at != filepath.Dir(at); _, err = os.Stat(at) {
		at = filepath.Dir(at)
	}
	if real, err := filepath.EvalSymlinks(at); err == nil {
		at = real
	}
	for dir := at; ; dir = filepath.Dir(dir) {
		if st, err := os.Stat(filepath.Join(dir, model.ConfigFile)); err == nil && st.Mode().IsRegular() {
			if _, err := planner.ReadConfig(dir); err == nil {
				return config.Refuse("Config.Checkpoint %s: %s is a model's folder; give a folder outside it, and move checkpoints that are there already (step-*, .spillway-marks) to resume from them", c.Checkpoint, dir)
			}
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}
