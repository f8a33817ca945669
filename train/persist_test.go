package train

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
)

// scratch returns a temporary folder, in memory where the system has /dev/shm. Checkpoints are
// synced to disk, and the tests write hundreds.
func scratch(t testing.TB) string {
	const memory = "/dev/shm"
	if st, err := os.Stat(memory); err != nil || !st.IsDir() {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(memory, "spillway-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// TestResumeContinuesBitForBit checks that a resumed run gives the bits of an uninterrupted run.
func TestResumeContinuesBitForBit(t *testing.T) {
	t.Parallel()
	base := func() request {
		c := tiny("gpt2")
		c.Steps, c.Seq, c.LRSchedule, c.Warmup, c.Clip = long.Or(4, 6), 24, "cosine", 2, 1
		return c
	}
	cases := map[string]func(*request){}
	for z := range 4 {
		cases[fmt.Sprintf("stage %d", z)] = func(c *request) { c.Zero, c.Ranks = z, 3 }
		if z%2 == 1 || long.On() {
			cases[fmt.Sprintf("stage %d, accumulation", z)] = func(c *request) { c.Zero, c.Ranks, c.Accum = z, 2, 3 }
		}
	}
	for _, name := range long.Or([]string{"sgd", "novograd", "muon"}, []string{"adamw", "sgd", "lamb", "lars", "larc", "novograd", "muon"}) {
		cases[name] = func(c *request) { c.Optimizer, c.Ranks = name, 2 }
	}
	cases["shuffled"] = func(c *request) { c.Order, c.Ranks = "shuffled", 2 }
	cases["shuffled, over the data's end"] = func(c *request) { c.Order, c.Batch, c.Seq, c.Ranks = "shuffled", 8, 60, 4 }
	cases["dropout"] = func(c *request) { c.Dropout, c.Ranks = 0.2, 2 }
	cases["evaluation"] = func(c *request) { c.EvalData, c.EvalEvery, c.EvalSteps = c.Data, 2, 2 }
	cases["frozen"] = func(c *request) { c.Freeze = []string{"h.0.*", "wpe.weight"} }
	cases["one rank"] = func(c *request) { c.Accum = 2 }
	for name, change := range cases {
		t.Run(name, func(t *testing.T) {
			c := base()
			change(&c)
			want := runOf(t, c)
			c.Checkpoint, c.SaveEvery = scratch(t), 1
			saving := runOf(t, c)
			require.Equal(t, want, saving, "saving changes nothing")
			for _, at := range []int{1, 3} { // the second time from the resumed run's checkpoints
				list, err := checkpoint.List(c.Checkpoint)
				require.NoError(t, err)
				for _, folder := range list {
					if m, err := checkpoint.ReadManifest(folder); err == nil && m.Step > at {
						require.NoError(t, os.RemoveAll(folder))
					}
				}
				c.Resume = true
				tr, err := c.start(context.Background())
				require.NoError(t, err)
				require.Equal(t, at, tr.Done())
				var losses []float32
				require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
					require.Equal(t, at+len(losses)+1, r.Step)
					losses = append(losses, r.Loss)
					return nil
				}))
				sha, err := tr.ParamsSHA256()
				require.NoError(t, err)
				require.NoError(t, tr.Close())
				require.Equal(t, want.losses[at:], losses, "resumed after step %d", at)
				require.Equal(t, want.sha, sha, "resumed after step %d", at)
			}
		})
	}
}

// files returns a checkpoint's states as stored, keyed by state.
func files(t *testing.T, folder string) map[string]string {
	t.Helper()
	m, err := checkpoint.Verify(context.Background(), folder)
	require.NoError(t, err)
	openedS, err := checkpoint.OpenCheckpoint(folder)
	require.NoError(t, err)
	s, err := openedS.States()
	require.NoError(t, err)
	all := map[string]string{}
	for _, tensor := range m.Tensors {
		for _, state := range tensor.States {
			b, err := s.Bytes(state, tensor.Name)
			require.NoError(t, err)
			all[state] += tensor.Name + ":" + string(b)
			if scale, err := s.Bytes(state+checkpoint.ScaleSuffix, tensor.Name); err == nil {
				all[state+checkpoint.ScaleSuffix] += tensor.Name + ":" + string(scale)
			}
		}
	}
	require.NoError(t, s.Close())
	require.Contains(t, all, "model")
	return all
}

// TestCheckpointsLoadAtAnyWorldSizeAndStage checks that a checkpoint loads at any number of ranks
// and stage, because it stores states by parameter and element. Saving again must give the same
// states.
func TestCheckpointsLoadAtAnyWorldSizeAndStage(t *testing.T) {
	t.Parallel()
	for _, optimizer := range []string{"adamw", "novograd"} {
		for _, model := range []string{"gpt2", "llama-untied"} {
			if optimizer == "novograd" && model != "gpt2" {
				continue
			}
			c := tiny(model)
			c.Ranks, c.Zero, c.Steps, c.Optimizer, c.Checkpoint = 3, 3, 2, optimizer, scratch(t)
			runOf(t, c)
			list, err := checkpoint.List(c.Checkpoint)
			require.NoError(t, err)
			require.Len(t, list, 1)
			want := files(t, list[0])
			for _, ranks := range []int{1, 2, 5} {
				for _, zero := range stagesInTurn(ranks / 2) {
					d := c
					d.Ranks, d.Zero, d.Resume = ranks, zero, true
					d.Checkpoint = scratch(t)
					require.NoError(t, os.CopyFS(filepath.Join(d.Checkpoint, filepath.Base(list[0])), os.DirFS(list[0])))
					tr, err := d.start(context.Background())
					require.NoError(t, err)
					require.Equal(t, 2, tr.Done())
					folder, err := tr.Save(context.Background())
					require.NoError(t, err)
					require.Equal(t, want, files(t, folder), "%s, %s, %d ranks, stage %d", model, optimizer, ranks, zero)
					require.NoError(t, tr.Close())
					d.Steps = 3
					require.Len(t, runOf(t, d).losses, 1)
				}
			}
		}
	}
}

// TestSavedWeightsReadBackEqual checks that a saved checkpoint holds the bits of the parameters,
// and that Init reads them back.
func TestSavedWeightsReadBackEqual(t *testing.T) {
	t.Parallel()
	for _, model := range []string{"gpt2", "llama-tied", "llama-untied"} {
		c := tiny(model)
		c.Ranks, c.Steps, c.Checkpoint = 3, 2, scratch(t)
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		require.NoError(t, tr.Run(context.Background(), nil))
		sha, err := tr.ParamsSHA256()
		require.NoError(t, err)
		list, err := checkpoint.List(c.Checkpoint)
		require.NoError(t, err)
		r := openState(t, list[0], checkpoint.ModelState)
		require.Len(t, r.Tensors(), len(tr.Plan().Program.Params))
		for _, tensor := range r.Tensors() {
			shape, want, err := tr.Parameter(tensor.Name)
			require.NoError(t, err)
			got := make([]float32, len(want))
			require.NoError(t, r.ReadFloat32(tensor.Name, 0, got))
			require.Equal(t, shape, tensor.Shape)
			require.Equal(t, want, got, tensor.Name)
		}
		require.NoError(t, r.Close())
		require.NoError(t, tr.Close())

		d := tiny(model)
		d.Model, d.Init, d.Zero, d.Ranks = list[0], list[0], 1, 2
		again, err := d.start(context.Background())
		require.NoError(t, err)
		got, err := again.ParamsSHA256()
		require.NoError(t, err)
		require.Equal(t, sha, got)
		require.NoError(t, again.Close())
	}
}

// rewrite copies a model folder; change edits or drops the tensors.
func rewrite(t *testing.T, from string, change func(*safetensors.Tensor) (keep bool)) string {
	t.Helper()
	dir := scratch(t)
	require.NoError(t, os.CopyFS(dir, os.DirFS(from)))
	require.NoError(t, os.Remove(filepath.Join(dir, "model.safetensors")))
	r, err := safetensors.Open(from)
	require.NoError(t, err)
	defer r.Close()
	type pair struct {
		from string
		to   safetensors.Tensor
	}
	var pairs []pair
	var tensors []safetensors.Tensor
	for _, old := range r.Tensors() {
		tensor := safetensors.Tensor{Name: old.Name, DType: safetensors.F32, Shape: append([]int64(nil), old.Shape...)}
		if change(&tensor) {
			pairs = append(pairs, pair{old.Name, tensor})
			tensors = append(tensors, tensor)
		}
	}
	w, err := safetensors.Create(filepath.Join(dir, "model.safetensors"), tensors, nil)
	require.NoError(t, err)
	for _, p := range pairs {
		n := int64(1)
		for _, d := range p.to.Shape {
			n *= d
		}
		v := make([]float32, n)
		old, _ := r.Tensor(p.from)
		whole := int64(1)
		for _, d := range old.Shape {
			whole *= d
		}
		require.NoError(t, r.ReadFloat32(p.from, 0, v[:min(n, whole)]))
		require.NoError(t, w.WriteFloat32(p.to.Name, 0, v))
	}
	require.NoError(t, w.Commit())
	return dir
}

// TestInitReadsHuggingFaceNames checks that weights load with and without the name prefixes of
// GPT-2 and Llama.
func TestInitReadsHuggingFaceNames(t *testing.T) {
	t.Parallel()
	loaded := func(c request) string {
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		defer func() { require.NoError(t, tr.Close()) }()
		sha, err := tr.ParamsSHA256()
		require.NoError(t, err)
		return sha
	}
	for model, prefixes := range map[string][]string{"gpt2": {"", "transformer."}, "llama-tied": {"", "model."}, "llama-untied": {"", "model."}} {
		want := loaded(tiny(model))
		bare := func(name string) string {
			for _, p := range prefixes[1:] {
				if len(name) > len(p) && name[:len(p)] == p {
					return name[len(p):]
				}
			}
			return name
		}
		for _, prefix := range prefixes {
			c := tiny(model)
			c.Init = rewrite(t, "../testdata/"+model, func(s *safetensors.Tensor) bool {
				if s.Name != "lm_head.weight" {
					s.Name = prefix + bare(s.Name)
				}
				return true
			})
			require.Equal(t, want, loaded(c), "%s with prefix %q", model, prefix)
		}
	}
}

// TestInitTellsOfTensorsThatItSkips checks that one note reports tensors that the model does not
// have. Known buffers are ignored.
func TestInitTellsOfTensorsThatItSkips(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*safetensors.Tensor) bool{
		`12 tensors are not read, the first is "h.1.attn.c_attn.bias": ` +
			`the model has no such parameters`: func(*safetensors.Tensor) bool { return true },
		`tensor "h.1.ln_1.weight" is not read: the model has no such parameter`: func(s *safetensors.Tensor) bool {
			return s.Name == "h.1.ln_1.weight" || !strings.HasPrefix(s.Name, "h.1.")
		},
		"": func(s *safetensors.Tensor) bool {
			s.Name = strings.NewReplacer("h.1.ln_1.bias", "transformer.h.0.attn.bias",
				"h.1.ln_2.bias", "h.0.self_attn.rotary_emb.inv_freq").Replace(s.Name)
			return !strings.HasPrefix(s.Name, "h.1.")
		},
	} {
		dir := rewrite(t, "../testdata/gpt2", change)
		path := filepath.Join(dir, "config.json")
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		one := strings.Replace(string(text), `"n_layer": 2`, `"n_layer": 1`, 1)
		require.NotEqual(t, string(text), one)
		require.NoError(t, os.WriteFile(path, []byte(one), 0o644))
		c := tiny("gpt2")
		c.Model, c.Init = dir, dir
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		var notes []string
		if want != "" {
			notes = []string{fmt.Sprintf("Config.Init %s: %s", dir, want)}
		}
		require.Equal(t, notes, tr.Notes())
		require.NoError(t, tr.Close())
	}
}

// TestInitRefusesOtherWeights checks that the error for unsuitable weights names the file and the
// tensor.
func TestInitRefusesOtherWeights(t *testing.T) {
	t.Parallel()
	from := "../testdata/gpt2"
	all := func(*safetensors.Tensor) bool { return true }
	missing := rewrite(t, from, func(s *safetensors.Tensor) bool {
		return s.Name != "h.1.mlp.c_fc.weight" && s.Name != "transformer.h.1.mlp.c_fc.weight"
	})
	wrong := rewrite(t, from, func(s *safetensors.Tensor) bool {
		if strings.HasSuffix(s.Name, "ln_f.bias") {
			s.Shape[0]++
		}
		return true
	})
	transposed := rewrite(t, from, func(s *safetensors.Tensor) bool {
		if strings.HasSuffix(s.Name, "h.0.mlp.c_fc.weight") {
			s.Shape[0], s.Shape[1] = s.Shape[1], s.Shape[0]
		}
		return true
	})
	cut := rewrite(t, from, all)
	file := filepath.Join(cut, "model.safetensors")
	st, err := os.Stat(file)
	require.NoError(t, err)
	require.NoError(t, os.Truncate(file, st.Size()-1))
	header := rewrite(t, from, all)
	require.NoError(t, os.WriteFile(filepath.Join(header, "model.safetensors"), []byte("\xff\xff\xff\xff\xff\xff\xff\x7f{}"), 0o644))
	empty := rewrite(t, from, all)
	require.NoError(t, os.WriteFile(filepath.Join(empty, "model.safetensors"), nil, 0o644))
	for dir, names := range map[string][]string{
		missing:    {missing, `"h.1.mlp.c_fc.weight" is missing`},
		wrong:      {wrong, "ln_f.bias", "shape"},
		transposed: {transposed, "c_fc.weight", "shape"},
		cut:        {"model.safetensors"},
		header:     {"model.safetensors"},
		empty:      {"model.safetensors"},
		"no/such":  {"no/such"},
	} {
		c := tiny("gpt2")
		c.Init = dir
		_, err := c.start(context.Background())
		require.Error(t, err, names)
		for _, name := range names {
			require.ErrorContains(t, err, name)
		}
		require.NotErrorIs(t, err, checkpoint.ErrDamaged, "bad input is not damage")
	}
}

// TestResumeRefuses checks that a changed file of a checkpoint is reported as damage, with its
// name. A checkpoint of another run is refused, and the error shows both values.
func TestResumeRefuses(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Checkpoint, c.SaveEvery = 2, 2, scratch(t), 1
	runOf(t, c)
	c.Resume, c.Steps = true, 4
	list, err := checkpoint.List(c.Checkpoint)
	require.NoError(t, err)
	require.Len(t, list, 2)
	entries, err := os.ReadDir(list[1])
	require.NoError(t, err)
	for _, e := range entries {
		for what, damage := range map[string]func(path string, text []byte) error{
			"a flipped bit": func(path string, text []byte) error {
				text[len(text)/2] ^= 1
				return os.WriteFile(path, text, 0o644)
			},
			"a cut file":    func(path string, text []byte) error { return os.WriteFile(path, text[:len(text)-2], 0o644) },
			"an empty file": func(path string, text []byte) error { return os.WriteFile(path, nil, 0o644) },
			"no file":       func(path string, text []byte) error { return os.Remove(path) },
			"a longer file": func(path string, text []byte) error { return os.WriteFile(path, append(text, 0), 0o644) },
		} {
			d := c
			d.Checkpoint = scratch(t)
			folder := filepath.Join(d.Checkpoint, filepath.Base(list[1]))
			require.NoError(t, os.CopyFS(folder, os.DirFS(list[1])))
			path := filepath.Join(folder, e.Name())
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			require.NoError(t, damage(path, text))
			_, err = d.start(context.Background())
			require.ErrorIs(t, err, checkpoint.ErrDamaged, "%s: %s", e.Name(), what)
			require.ErrorContains(t, err, e.Name(), what)
		}
	}
	d := c
	d.Optimizer = "sgd"
	_, err = d.start(context.Background())
	require.ErrorContains(t, err, "Config.Optimizer adamw")
	require.ErrorContains(t, err, "sgd")
	d = c
	d.Model, d.Init = "../testdata/llama-tied", "random"
	_, err = d.start(context.Background())
	require.ErrorContains(t, err, "another model")
}

// TestKeep checks that Keep counts confirmed checkpoints. The newest checkpoint, which no update
// has confirmed, is kept in addition.
func TestKeep(t *testing.T) {
	t.Parallel()
	for keep, want := range map[int]int{0: 5, 1: 2, 2: 3, 9: 5} {
		c := tiny("gpt2")
		c.Steps, c.Checkpoint, c.SaveEvery, c.Keep = 5, scratch(t), 1, keep
		runOf(t, c)
		list, err := checkpoint.List(c.Checkpoint)
		require.NoError(t, err)
		require.Len(t, list, want)
		m, err := checkpoint.Verify(context.Background(), list[len(list)-1])
		require.NoError(t, err)
		require.Equal(t, 5, m.Step)
		entries, err := os.ReadDir(c.Checkpoint)
		require.NoError(t, err)
		require.Len(t, entries, want+1, "nothing else is left there, but the marks")
	}
}

// TestCancelSaves checks that a canceled run saves its last completed step.
func TestCancelSaves(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Checkpoint = 2, 1000, scratch(t)
	ctx, cancel := context.WithCancel(context.Background())
	tr, err := c.start(ctx)
	require.NoError(t, err)
	err = tr.Run(ctx, func(r StepResult) error {
		if r.Step == 3 {
			cancel()
		}
		return nil
	})
	require.True(t, errors.Is(err, context.Canceled))
	require.NoError(t, tr.Close())
	list, err := checkpoint.List(c.Checkpoint)
	require.NoError(t, err)
	require.Len(t, list, 1)
	m, err := checkpoint.Verify(context.Background(), list[0])
	require.NoError(t, err)
	require.Equal(t, 3, m.Step)
	h, err := planner.ReadConfig(list[0])
	require.NoError(t, err)
	require.Equal(t, model.GPT2, h.Family)
}

// TestEvaluationDisturbsNothing checks that evaluations, which share the arena with training, do
// not change its bits. The held-out loss must be the same at every stage.
func TestEvaluationDisturbsNothing(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps = 3, 4
	want := runOf(t, c)
	c.EvalData, c.EvalEvery, c.EvalSteps = "../testdata/text.txt", 2, 3
	var first []float32
	for zero := range 4 {
		c.Zero = zero
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		var losses, held []float32
		require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
			losses = append(losses, r.Loss)
			require.Equal(t, r.Step%2 == 0, r.Eval != nil)
			if r.Eval != nil {
				held = append(held, r.Eval.Loss)
				require.Equal(t, int64(3*3*c.Batch*c.Seq), r.Eval.Targets)
			}
			for sp := range graph.NumSpaces {
				require.LessOrEqual(t, r.Peak[sp][0], r.Planned[sp][0])
			}
			return nil
		}))
		sha, err := tr.ParamsSHA256()
		require.NoError(t, err)
		require.NoError(t, tr.Close())
		require.Equal(t, want.losses, losses)
		require.Equal(t, want.sha, sha)
		if first == nil {
			first = held
		}
		require.Equal(t, first, held, "stage %d", zero)
	}
}

// openState opens a state of the checkpoint at path folder and closes it at the end of the test.
func openState(t *testing.T, folder, name string) checkpoint.Tensors {
	t.Helper()
	c, err := checkpoint.OpenCheckpoint(folder)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	s, err := c.State(name)
	require.NoError(t, err)
	return s
}
