package planner

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/model"
)

// Adapter is a folder in the layout of Hugging Face's PEFT.
type Adapter struct {
	*lora.PEFT
	Folder string
}

// OpenAdapter reads an adapter's folder. It returns nil for any other folder, such as a model's,
// which has a config.json. The base model must be a local folder: nothing is downloaded.
func OpenAdapter(folder string) (a *Adapter, err error) {
	if _, err := os.Stat(filepath.Join(folder, model.ConfigFile)); err == nil {
		return nil, nil
	}
	text, err := os.ReadFile(filepath.Join(folder, lora.ConfigFile))
	if errors.Is(err, os.ErrNotExist) || err != nil && !isFolder(folder) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	weights, err := safetensors.Open(filepath.Join(folder, lora.WeightsFile))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, weights.Close()) }()
	var names []string
	for _, t := range weights.Tensors() {
		names = append(names, t.Name)
	}
	a = &Adapter{Folder: folder}
	if a.PEFT, err = lora.ParsePEFT(text, names); err != nil {
		return nil, fmt.Errorf("%s: %w", folder, err)
	}
	for _, base := range []string{a.Base, filepath.Join(folder, a.Base)} {
		if a.Base != "" && isFolder(base) {
			a.Base = base
			return a, nil
		}
	}
	return nil, fmt.Errorf("%s: base_model_name_or_path is %.80q, which is no folder here, and nothing is downloaded: set it to the path of the base model's folder",
		filepath.Join(folder, lora.ConfigFile), a.Base)
}

func isFolder(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}
