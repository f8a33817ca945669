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

// Terms returns the settings that decide a run's results, under the names that checkpoints use.
// They are the settings that Config.Resume compares, with defaults filled in and each path replaced
// by a hash of its contents. Files that only the leader has are left out.
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
	if terms["data"] == "" && p.Order == "" { // the default order depends on the data
		delete(terms, "order")
	}
	return terms, nil
}

// settingName returns the name of a setting in errors.
func settingName(name string) string {
	return map[string]string{"data": "Config.Data", "eval-data": "Config.EvalData", "init": "Config.Init", "template": "Config.Template", "tokenizer": "Config.Tokenizer"}[name]
}

// contentOrName returns the Content of a file, or spec in lower case if it is one of names.
func contentOrName(spec string, names ...string) (string, error) {
	if name := strings.ToLower(spec); slices.Contains(names, name) {
		return name, nil
	}
	return data.Content(spec, data.Options{})
}

// weightsContent returns the Content of the weights in a model's folder. For a checkpoint folder it
// returns the hashes in the newest checkpoint's manifest, since a run may remove its files
// meanwhile.
func weightsContent(ctx context.Context, path string) (string, error) {
	if st, err := os.Stat(path); err != nil || !st.IsDir() {
		return contentOrName(path, "random")
	}
	saved, _, err := checkpoint.Take(ctx, filesys.System, path, model.ConfigFile)
	if err != nil {
		return "", nil // the leader loads it and reports the error
	}
	if saved == nil {
		files, _ := filepath.Glob(filepath.Join(path, "*.safetensors*")) // the pattern is valid, so Glob returns no error
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

// alike refuses processes whose settings would give different results. all[0] is the leader's
// description.
func (j *Job) alike(c *config.Config, all []run.Hello) error {
	for _, h := range all {
		diff := all[0].Differs(h)
		switch {
		case h.Refused != "":
			return j.refusal(h, h.Refused)
		case diff != "":
			j.differ = true
			return fmt.Errorf("the processes of a job must be alike: %s", diff)
		case h.Rounding != all[0].Rounding && strings.EqualFold(c.PrecisionName(), "bf16") && !c.PortableBF16():
			c.Warnf("rank %d (host %s) rounds sums of bf16 products by %s, rank %d (host %s) by %s: the last bits depend on which rank has which CPU; with Config.BF16Rounding portable they would not", h.Rank, h.Host, h.Rounding, all[0].Rank, all[0].Host, all[0].Rounding)
		}
	}
	return nil
}

// refusal returns the error of a process that refuses the run. All processes end with it.
func (j *Job) refusal(h run.Hello, why string) error {
	j.differ = true
	return fmt.Errorf("rank %d (host %s): %s", h.Rank, h.Host, why)
}

// within sets the run's memory caps to the smallest that any of its processes was given.
func (j *Job) within(c config.Config) config.Config {
	for sp, limit := range map[graph.Space]*int64{graph.Device: &c.DeviceMemory, graph.Host: &c.HostMemory, graph.Disk: &c.DiskMemory} {
		if least := j.caps[sp]; least > 0 && (*limit == 0 || *limit > least) {
			*limit = least
		}
	}
	return c
}

// mine returns the leader's configuration with the paths that this process was started with.
func (j *Job) mine(c config.Config) config.Config {
	if j.Asked != nil {
		c.Model, c.Disk = j.Asked.Model, j.Asked.Disk
	}
	return c
}

// Folder is the path under which this process finds the checkpoints; "" means the leader's
// path.
func (j *Job) Folder() string {
	if j.Asked == nil {
		return ""
	}
	return j.Asked.Checkpoint
}
