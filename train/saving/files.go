package saving

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/internal/regular"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
)

// Files of a Hugging Face model folder beside its config and weights.
const (
	tokenizerConfigFile  = "tokenizer_config.json"
	generationConfigFile = "generation_config.json"
	chatTemplateFile     = "chat_template.jinja" // takes precedence over tokenizer_config.json's chat_template
)

// ModelFiles returns the names of all files that a checkpoint may hold for Hugging Face's loaders,
// beside the weights.
func ModelFiles() []string {
	return append([]string{model.ConfigFile, planner.TokenizerFile}, besideTokenizer...)
}

// besideTokenizer are the files that may accompany a tokenizer.json.
var besideTokenizer = []string{tokenizerConfigFile, generationConfigFile, "special_tokens_map.json", chatTemplateFile}

// maxModelFile bounds a file that is copied into every checkpoint.
const maxModelFile = 64 << 20

// modelFiles returns the small files that make a checkpoint a Hugging Face folder: the config and,
// if the model's tokenizer is known, the tokenizer's files and the generation config. They are made
// once.
func (s *Saver) modelFiles() ([]checkpoint.Blob, error) {
	if s.files != nil {
		return s.files, nil
	}
	files := []checkpoint.Blob{}
	spec := s.cfg.Tokenizer
	if spec == "" {
		spec = planner.ModelTokenizer(&s.cfg.Config, nil, s.cfg.Shape.Vocab)
	}
	var specials token.Specials
	if spec != "" {
		tok, err := token.Open(spec)
		if err == nil {
			specials = token.SpecialsOf(tok)
			files, err = tokenizerFiles(spec, tok, s.cfg.Shape.Positions, s.data.Template())
		}
		if err != nil {
			return nil, fmt.Errorf("the tokenizer's files: %w", err)
		}
	}
	if s.cfg.Own.Model == nil { // a model that the program provides has no config.json
		config, err := model.Marshal(s.cfg.Shape, "float32", specials.ModelIDs())
		if err != nil {
			return nil, err
		}
		files = append([]checkpoint.Blob{{Name: model.ConfigFile, Data: config}}, files...)
	}
	s.files = files
	return files, nil
}

// tokenizerFiles returns a tokenizer's files: copies of its source files, or generated ones for a
// built-in tokenizer. A template replaces its chat template.
func tokenizerFiles(spec string, tok token.Tokenizer, positions int, template string) (files []checkpoint.Blob, err error) {
	have := map[string][]byte{}
	switch strings.ToLower(spec) {
	case "bytes", "gpt2", token.ByteChatName:
		if have[planner.TokenizerFile], err = token.HuggingFace(tok); err != nil {
			return nil, err
		}
	default:
		if have[planner.TokenizerFile], err = regular.ReadFile(spec, maxModelFile); err != nil {
			return nil, err
		}
		if filepath.Base(spec) == planner.TokenizerFile {
			for _, name := range besideTokenizer {
				text, err := regular.ReadFile(filepath.Join(filepath.Dir(spec), name), maxModelFile)
				if err == nil {
					have[name] = text
				} else if !errors.Is(err, os.ErrNotExist) {
					return nil, err
				}
			}
		}
	}
	if template != "" {
		have[chatTemplateFile] = []byte(template)
	}
	config := map[string]any{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions, "clean_up_tokenization_spaces": false}
	generation := map[string]any{"max_length": positions}
	specials := token.SpecialsOf(tok)
	for key, text := range specials.Names {
		config[key] = text
	}
	if specials.Template != "" && template == "" {
		config["chat_template"] = specials.Template
	}
	if eot := tok.EOT(); eot >= 0 {
		config["eos_token"] = tok.Decode([]int32{eot})
	}
	for key, value := range specials.ModelIDs() {
		generation[key] = value
	}
	for name, value := range map[string]any{tokenizerConfigFile: config, generationConfigFile: generation} {
		if have[name] != nil {
			continue
		}
		text, err := json.MarshalIndent(value, "", "  ")
		if err != nil {
			return nil, err
		}
		have[name] = append(text, '\n')
	}
	for _, name := range append([]string{planner.TokenizerFile}, besideTokenizer...) {
		if text, ok := have[name]; ok {
			files = append(files, checkpoint.Blob{Name: name, Data: text})
		}
	}
	return files, nil
}
