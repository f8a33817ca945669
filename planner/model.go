package planner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/model"
)

// Model is a model to generate with or to evaluate. All files of a checkpoint are open, because a
// run may remove it meanwhile.
type Model struct {
	Path   string            // of the model's folder, or of the checkpoint
	Chosen bool              // the checkpoint is the newest one in a folder
	Passed []checkpoint.Pass // newer checkpoints that were skipped
	saved  *checkpoint.Checkpoint
	shape  *model.Config // of a model without files; nil: it has some
}

// ModelOf returns a model with a shape but without files.
func ModelOf(name string, shape model.Config) *Model { return &Model{Path: name, shape: &shape} }

// OpenModel opens the model at a path: a model's folder, a checkpoint, or the newest complete one
// in a folder of checkpoints. Of a checkpoint it verifies config.json and the file weights.
func OpenModel(ctx context.Context, path, weights string) (*Model, error) {
	saved, passed, err := checkpoint.Take(ctx, filesys.System, path, model.ConfigFile, weights)
	if err != nil || saved == nil {
		return &Model{Path: path}, err
	}
	return &Model{Path: saved.Folder, Chosen: filepath.Clean(saved.Folder) != filepath.Clean(path), Passed: passed, saved: saved}, nil
}

// Close closes the files.
func (m *Model) Close() error {
	if m.saved == nil {
		return nil
	}
	return m.saved.Close()
}

// Saved returns the open checkpoint; nil if the model is in a model's folder, or m is nil.
func (m *Model) Saved() *checkpoint.Checkpoint {
	if m == nil {
		return nil
	}
	return m.saved
}

// Readable reports whether there is a checkpoint, a model's config.json or an adapter's.
func (m *Model) Readable() bool {
	found := m.saved != nil
	for _, name := range []string{model.ConfigFile, lora.ConfigFile} {
		_, err := os.Stat(filepath.Join(m.Path, name))
		found = found || err == nil
	}
	return found
}

func (m *Model) has(name string) bool {
	return m.saved != nil && slices.ContainsFunc(m.saved.Manifest.Files, func(f checkpoint.File) bool { return f.Name == name })
}

// Config reads the model's shape.
func (m *Model) Config() (model.Config, error) {
	if m.shape != nil {
		return *m.shape, nil
	}
	if m.saved == nil {
		return ModelConfig(m.Path)
	}
	if !m.has(model.ConfigFile) {
		return model.Config{}, fmt.Errorf("Config.Model %s: the checkpoint has no %s: it is of a program's own model", m.Path, model.ConfigFile)
	}
	text, err := m.saved.Read(model.ConfigFile)
	var c model.Config
	if err == nil {
		c, err = model.Parse(text)
	}
	if err != nil {
		return c, fmt.Errorf("Config.Model %s: %w", filepath.Join(m.Path, model.ConfigFile), err)
	}
	return c, nil
}

// settings returns the settings of the run that wrote the open checkpoint.
func (m *Model) settings() (map[string]string, error) {
	var was struct {
		Settings map[string]string `json:"settings"`
	}
	if err := json.Unmarshal(m.saved.Manifest.Run, &was); err != nil {
		return nil, fmt.Errorf("%w: %s: its run can't be read: %w", checkpoint.ErrDamaged, m.saved.Folder, err)
	}
	return was.Settings, nil
}

// Adapters returns the adapters of the run that wrote the open checkpoint, or of an adapter's
// folder.
func (m *Model) Adapters() (o lora.Options, err error) {
	if m.saved == nil {
		a, err := OpenAdapter(m.Path)
		if a == nil || err != nil {
			return o, err
		}
		return a.Options, nil
	}
	was, err := m.settings()
	if err != nil {
		return o, err
	}
	if o, err = lora.Parse(was["lora"]); err != nil {
		err = fmt.Errorf("%w: %s: its run can't be read: %w", checkpoint.ErrDamaged, m.saved.Folder, err)
	}
	return o, err
}

// TrainedSeq returns Config.Seq of the run that wrote the open checkpoint; 0 if it is not known, or
// the model is a folder.
func (m *Model) TrainedSeq() (int, error) {
	if m.saved == nil {
		return 0, nil
	}
	was, err := m.settings()
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(was["seq"])
	if err != nil || n < 1 {
		return 0, nil
	}
	return n, nil
}

// tokenizer returns the path of the model's own tokenizer.
func (m *Model) tokenizer() string { return filepath.Join(m.Path, TokenizerFile) }

// OpenTokenizer is token.Open, except that it reads an open checkpoint's own tokenizer from the
// open files.
func (m *Model) OpenTokenizer(path string) (token.Tokenizer, error) {
	if m == nil || m.saved == nil || path != m.tokenizer() {
		return token.Open(path)
	}
	text, err := m.saved.Read(TokenizerFile)
	if err != nil {
		return nil, err
	}
	return token.Parse(path, text, func(name string) ([]byte, error) {
		if !m.has(name) {
			return nil, fs.ErrNotExist
		}
		return m.saved.Read(name)
	})
}

// TokenizerFile is the name of the tokenizer's file in a model's folder.
const TokenizerFile = "tokenizer.json"

// ModelConfig reads the model's shape: from the folder name, if it holds a config.json, checkpoints
// or an adapter, or else from the preset of that name.
func ModelConfig(name string) (model.Config, error) {
	_, err := presetConfig(name)
	if err != nil { // a preset precedes a folder of checkpoints with its name
		m, err := OpenModel(context.Background(), name, model.ConfigFile)
		if err != nil {
			return model.Config{}, fmt.Errorf("Config.Model %s: %w", name, err)
		}
		if m.saved != nil {
			h, err := m.Config()
			return h, errors.Join(err, m.Close())
		}
		if a, err := OpenAdapter(name); err != nil {
			return model.Config{}, fmt.Errorf("Config.Model %s: %w", name, err)
		} else if a != nil {
			return ModelConfig(a.Base)
		}
	}
	_, err = os.Stat(filepath.Join(name, model.ConfigFile))
	if isFolder(name) && (err == nil || strings.ContainsAny(name, `/\`)) {
		c, err := ReadConfig(name)
		if err != nil {
			return c, fmt.Errorf("Config.Model %s: %w", name, err)
		}
		return c, nil
	}
	if strings.ContainsAny(name, `/\`) {
		err := fmt.Errorf("Config.Model %s: no such folder", name)
		if near := model.NearestPreset(name[strings.LastIndexAny(name, `/\`)+1:]); near != "" {
			err = fmt.Errorf("%w; nothing is downloaded: give a folder with its config.json, or for a plan or training from scratch the nearest preset, %s", err, near)
		}
		return model.Config{}, err
	}
	c, err := presetConfig(name)
	if err != nil && isFolder(name) {
		return c, fmt.Errorf("Config.Model %s: the folder has no %s, and no checkpoint", name, model.ConfigFile)
	}
	return c, err
}

func presetConfig(name string) (model.Config, error) {
	p, err := model.LookupPreset(name)
	if err != nil {
		return model.Config{}, fmt.Errorf("Config.Model: %w", err)
	}
	return p.Config, nil
}
