package job

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/saving"
)

// Terms is what decides a run's results, by the names under which checkpoints record it:
// the settings that Config.Resume compares, with defaults filled in, and in place of each path
// the content that it leads to. What this machine does not have, only the leader reads; it
// is left out.
func Terms(ctx context.Context, c config.Config) (map[string]string, error) {
	p, err := planner.Request{Config: c}.Resolve()
	if err != nil {
		return nil, err
	}
	terms := saving.Settings(&p.Config)
	shape, err := json.Marshal(p.Shape)
	if err != nil {
		return nil, err
	}
	var fields map[string]any
	if err := json.Unmarshal(shape, &fields); err != nil {
		return nil, err
	}
	for name, v := range fields {
		terms["model "+name] = fmt.Sprint(v)
	}
	contents := map[string]func() (string, error){
		"data": func() (string, error) {
			return data.Content(p.Data, data.Options{Glob: p.DataGlob, TextField: p.TextField})
		},
		"eval-data": func() (string, error) {
			return data.Content(p.EvalData, data.Options{Glob: p.EvalGlob, TextField: p.TextField})
		},
		"tokenizer": func() (string, error) { return contentOrName(p.Tokenizer, "", "bytes", "gpt2") },
		"template":  func() (string, error) { return contentOrName(p.Template) },
		"init":      func() (string, error) { return weightsContent(ctx, p.Init) },
	}
	for name, content := range contents {
		terms[name], err = content()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", settingName(name), err)
		}
		if terms[name] == "" {
			delete(terms, name)
		}
	}
	if terms["data"] == "" && p.Order == "" { // the default depends on it
		delete(terms, "order")
	}
	return terms, nil
}

// settingName is a setting as errors name it.
func settingName(name string) string {
	return map[string]string{"data": "Config.Data", "eval-data": "Config.EvalData", "init": "Config.Init", "template": "Config.Template", "tokenizer": "Config.Tokenizer"}[name]
}

// contentOrName is a file's content, or one of names, in lower case.
func contentOrName(spec string, names ...string) (string, error) {
	if name := strings.ToLower(spec); slices.Contains(names, name) {
		return name, nil
	}
	return data.Content(spec, data.Options{})
}

// weightsContent is Content of the weights in a model's folder, or what the manifest of the
// newest checkpoint of a folder says of them: a run may remove its files meanwhile.
func weightsContent(ctx context.Context, path string) (string, error) {
	if st, err := os.Stat(path); err != nil || !st.IsDir() {
		return contentOrName(path, "random")
	}
	saved, _, err := checkpoint.Take(ctx, filesys.System, path, model.ConfigFile)
	if err != nil {
		return "", nil // the leader, which loads it, says what is wrong
	}
	if saved == nil {
		files, _ := filepath.Glob(filepath.Join(path, "*.safetensors*")) // its pattern is well formed
		return data.ContentOf(files)
	}
	h := sha256.New()
	for _, f := range saved.Manifest.Files {
		if strings.HasSuffix(f.Name, ".safetensors") {
			fmt.Fprintln(h, f.Name, f.Bytes, f.CRC32C)
		}
	}
	return fmt.Sprintf("step %d of SHA-256 %x…", saved.Manifest.Step, h.Sum(nil)[:8]), saved.Close()
}

// alike refuses processes that would not come to one result. The first is the leader's.
func (j *Job) alike(c *config.Config, all []run.Hello) error {
	for _, h := range all {
		diff := all[0].Differs(h)
		switch {
		case h.Refused != "":
			j.differ = true
			return fmt.Errorf("rank %d (host %s): %s", h.Rank, h.Host, h.Refused)
		case diff != "":
			j.differ = true
			return fmt.Errorf("the processes of a job must be alike: %s", diff)
		case h.Rounding != all[0].Rounding && strings.EqualFold(c.PrecisionName(), "bf16") && !c.PortableBF16():
			c.Warnf("rank %d (host %s) rounds sums of bf16 products by %s, rank %d (host %s) by %s: the last bits depend on which rank has which CPU; with Config.BF16Rounding portable they would not", h.Rank, h.Host, h.Rounding, all[0].Rank, all[0].Host, all[0].Rounding)
		}
	}
	return nil
}

// within makes the caps of the run the smallest that any of its processes was given.
func (j *Job) within(c config.Config) config.Config {
	for sp, limit := range map[graph.Space]*int64{graph.Device: &c.DeviceMemory, graph.Host: &c.HostMemory, graph.Disk: &c.DiskMemory} {
		if least := j.caps[sp]; least > 0 && (*limit == 0 || *limit > least) {
			*limit = least
		}
	}
	return c
}

// mine is the leader's configuration with the paths that this process was asked to use.
func (j *Job) mine(c config.Config) config.Config {
	if j.Asked != nil {
		c.Model, c.Disk = j.Asked.Model, j.Asked.Disk
	}
	return c
}

// Folder is where this process finds the checkpoints; "": where the leader does.
func (j *Job) Folder() string {
	if j.Asked == nil {
		return ""
	}
	return j.Asked.Checkpoint
}
