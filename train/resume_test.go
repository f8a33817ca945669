package train

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/train/saving"
)

// ended runs c to its end and returns the notes of its start.
func ended(t *testing.T, c request) []string {
	t.Helper()
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	require.NoError(t, tr.Run(context.Background(), nil))
	return tr.Notes()
}

// refused starts c, which must fail with an error that contains the given words.
func refused(t *testing.T, c request, words ...string) {
	t.Helper()
	tr, err := c.start(context.Background())
	if err == nil {
		require.NoError(t, tr.Close())
	}
	require.Error(t, err)
	for _, w := range words {
		require.ErrorContains(t, err, w)
	}
}

func keeping(t *testing.T, steps int) request {
	c := tiny("gpt2")
	c.Steps, c.Seq, c.Batch, c.Ranks, c.Checkpoint = steps, 16, 2, 2, scratch(t)
	return c
}

func newestOf(t *testing.T, dir string) checkpoint.Choice {
	t.Helper()
	c, err := checkpoint.Choose(context.Background(), dir, nil)
	require.NoError(t, err)
	return c
}

// TestResumeGoesOnAtTheSamplesSeen checks that a resumed run continues at the sample after the last
// one read, with any batch, accumulation and number of ranks.
func TestResumeGoesOnAtTheSamplesSeen(t *testing.T) {
	t.Parallel()
	for _, order := range []string{"sequential", "shuffled"} {
		c := keeping(t, 3)
		c.Order = order
		require.Empty(t, ended(t, c)) // 3 steps of 2 ranks × 2 rows: samples 0 to 11
		seen := int64(12)
		for i, next := range []struct{ ranks, batch, accum int }{{3, 2, 2}, {1, 5, 1}, {4, 1, 3}} {
			d := c
			d.Resume, d.Ranks, d.Batch, d.Accum, d.Steps = true, next.ranks, next.batch, next.accum, 4+i
			tr, err := d.start(context.Background())
			require.NoError(t, err)
			s := tr.train.sampler
			require.Equal(t, seen, s.Tell(3+i))
			require.NotEmpty(t, tr.Notes())
			require.NoError(t, tr.Run(context.Background(), nil))
			require.NoError(t, tr.Close())
			seen += int64(next.ranks * next.batch * next.accum)
			var was saving.Record
			require.NoError(t, json.Unmarshal(newestOf(t, c.Checkpoint).Manifest.Run, &was))
			require.Equal(t, seen, was.Samples)
		}
	}
}

// TestResumeOnOtherRanksSeesTheSameData checks that the same global batch on other ranks reads the
// same data: losses agree except for rounding.
func TestResumeOnOtherRanksSeesTheSameData(t *testing.T) {
	t.Parallel()
	c := keeping(t, 6)
	c.SaveEvery = 3
	want := runOf(t, c)
	require.NoError(t, os.RemoveAll(newestOf(t, c.Checkpoint).Folder))
	c.Resume, c.Ranks, c.Batch, c.Accum = true, 1, 2, 2
	got := runOf(t, c)
	require.Len(t, got.losses, 3)
	for i := range got.losses {
		require.InDelta(t, want.losses[3+i], got.losses[i], 1e-5)
	}
}

func TestResumeTellsWhatChanged(t *testing.T) {
	t.Parallel()
	c := keeping(t, 2)
	ended(t, c)
	c.Resume, c.Steps = true, 4
	c.LR, c.Beta2, c.WeightDecay, c.Dropout, c.Ranks, c.LRSchedule = 0.25, 0.5, 0, 0.1, 1, "cosine"
	at := "changed since step-00000002: "
	require.Equal(t, []string{
		at + "Config.Beta2: 0.95 → 0.5", at + "Config.Dropout: 0 → 0.1", at + "Config.LR: 0.001 → 0.25", at + "Config.LRSchedule: constant → cosine",
		at + "Config.Ranks: 2 → 1", at + "Config.Steps: not in use → 4", at + "Config.WeightDecay: 0.1 → 0",
		at + "rows of a step: 4 → 2, and so the results; Config.GlobalBatch 4 keeps them",
	}, ended(t, c))
	c.Steps, c.Zero, c.Threads, c.Recompute, c.Prefetch, c.LRSchedule = 6, 1, 1, "full", 0, "constant"
	require.Len(t, ended(t, c), 2, "memory's flags are no change")

	c = keeping(t, 2)
	c.Accum = 2
	ended(t, c)
	c.Resume, c.Steps, c.Zero = true, 3, 2
	require.Empty(t, ended(t, c), "stages 2 and 3 have the same bits")
	c.Steps, c.Zero = 4, 1
	require.Equal(t, []string{"changed since step-00000003: Config.Zero: 2 → 1, which adds gradients in another order " +
		"(Config.Reproducible: all stages have the same bits)"}, ended(t, c))
	c.Steps, c.Zero, c.AccumOrder = 5, 3, "layer"
	require.Equal(t, []string{"changed since step-00000004: Config.AccumOrder: not in use → layer"}, ended(t, c))
}

// TestResumeTellsOtherArithmetic checks that a checkpoint records how its products round. A resume
// on the same machine gives no note.
func TestResumeTellsOtherArithmetic(t *testing.T) {
	t.Parallel()
	c := keeping(t, 1)
	c.Precision = "bf16"
	ended(t, c)
	c.Resume, c.Steps = true, 2
	require.Empty(t, ended(t, c), "the same machine")

	choice := newestOf(t, c.Checkpoint)
	var was saving.Record
	require.NoError(t, json.Unmarshal(choice.Manifest.Run, &was))
	now := "CPU, bf16 products by " + gemm.Rounding(false)
	require.Equal(t, now, was.Arithmetic)
	half := c
	half.Precision = "fp16"
	require.Equal(t, "CPU", saving.Arithmetic(&half.Config, nil), "widened everywhere")
}

// TestResumeRefusesOtherSamples checks that other data, another seed or another order is refused
// unless AcceptChanges is set.
func TestResumeRefusesOtherSamples(t *testing.T) {
	t.Parallel()
	c := keeping(t, 2)
	ended(t, c)
	c.Resume, c.Steps = true, 4
	other := filepath.Join(t.TempDir(), "other.txt")
	require.NoError(t, os.WriteFile(other, []byte(strings.Repeat("other words ", 500)), 0o644))
	for word, change := range map[string]func(*request){
		"Config.Data is other data": func(c *request) { c.Data, c.Order = other, "sequential" },
		"Config.Seed: 1 → 9":        func(c *request) { c.Seed = 9 },
		"Config.Order: ":            func(c *request) { c.Order = "shuffled" },
	} {
		d := c
		change(&d)
		if word == "Config.Data is other data" {
			d.Order = c.Order
		}
		before := names(t, c.Checkpoint)
		refused(t, d, word, "step-00000002", "Config.AcceptChanges")
		require.Equal(t, before, names(t, c.Checkpoint), "a refused start changes nothing")
		d.AcceptChanges = true
		copied := scratch(t)
		require.NoError(t, os.CopyFS(copied, os.DirFS(c.Checkpoint)))
		d.Checkpoint = copied
		require.NotEmpty(t, ended(t, d))
	}
	moved := filepath.Join(t.TempDir(), "moved"+filepath.Ext(c.Data))
	text, err := os.ReadFile(c.Data)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(moved, text, 0o644))
	c.Data = moved
	require.Empty(t, ended(t, c), "the same tokens elsewhere are the same data")
}

func names(t *testing.T, dir string) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// TestResumeAtAnotherLength checks another row length: sequential data continue at the same token,
// and shuffled data are refused because the order changes.
func TestResumeAtAnotherLength(t *testing.T) {
	t.Parallel()
	c := keeping(t, 3)
	ended(t, c) // 12 rows of 16 tokens
	d := c
	d.Resume, d.Steps, d.Seq = true, 4, 32
	tr, err := d.start(context.Background())
	require.NoError(t, err)
	require.EqualValues(t, 192, tr.train.sampler.Start(3, 0, 0, 0))
	require.NoError(t, tr.Close())
	c = keeping(t, 3)
	c.Order = "shuffled"
	ended(t, c)
	c.Resume, c.Seq = true, 32
	refused(t, c, "Config.Seq: 16 → 32", "Config.AcceptChanges")
}

func TestResumeRefusesToLoop(t *testing.T) {
	t.Parallel()
	c := keeping(t, 4)
	c.SaveEvery = 2
	ended(t, c)
	c.Resume, c.Steps = true, 8
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	tr.saver.MarkDivergence(5)
	require.NoError(t, tr.Close())
	refused(t, c, "step 5", "step-00000002", "Config.LR", "Config.OnNonFinite skip")
	d := c
	d.LR /= 2
	var told []string
	d.Warn = func(line string) { told = append(told, line) }
	d.Steps = 6
	require.Equal(t, []string{"changed since step-00000002: Config.LR: 0.001 → 0.0005"}, ended(t, d))
	require.Len(t, told, 1)
	require.Contains(t, told[0], "step-00000004 is passed over: ")
	ended(t, c) // it is past step 5
}

// TestStartRefusesAUsedFolder checks that a start in a folder with checkpoints is refused before
// anything changes. A second run in a folder that is in use is refused too.
func TestStartRefusesAUsedFolder(t *testing.T) {
	t.Parallel()
	c := keeping(t, 2)
	ended(t, c)
	before := names(t, c.Checkpoint)
	refused(t, c, "holds checkpoints already (1, the newest is step-00000002)", "Config.Resume", "fresh folder")
	require.Equal(t, before, names(t, c.Checkpoint))
	c.Resume, c.Steps = true, 3
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	refused(t, c, "another run has "+c.Checkpoint+" open", fmt.Sprint("process ", os.Getpid()))
	require.NoError(t, tr.Run(context.Background(), nil))
	require.NoError(t, tr.Close())
	require.NoError(t, os.RemoveAll(c.Checkpoint))
	ended(t, c) // with an empty folder it starts at step 1
	require.Equal(t, 3, newestOf(t, c.Checkpoint).Step)
}

// TestARefusedRunTouchesNoFolder checks that a run refused by New leaves no folder or file.
func TestARefusedRunTouchesNoFolder(t *testing.T) {
	t.Parallel()
	c := keeping(t, 2)
	c.Checkpoint = filepath.Join(c.Checkpoint, "a", "b")
	c.Init = "no/such"
	refused(t, c, "no/such")
	require.NoDirExists(t, filepath.Dir(c.Checkpoint))
	c.Init, c.DeviceMemory = "random", 1024
	refused(t, c, "does not fit")
	require.NoDirExists(t, filepath.Dir(c.Checkpoint))
}

// TestNothingNewIsNotSavedAgain checks that a resumed run interrupted before its first step saves
// nothing.
func TestNothingNewIsNotSavedAgain(t *testing.T) {
	t.Parallel()
	c := keeping(t, 2)
	ended(t, c)
	c.Resume, c.Steps = true, 9
	ctx, cancel := context.WithCancel(context.Background())
	tr, err := c.start(ctx)
	require.NoError(t, err)
	cancel()
	require.ErrorIs(t, tr.Run(ctx, nil), context.Canceled)
	require.NoError(t, tr.Close())
	require.Len(t, names(t, c.Checkpoint), 2)
}

// TestResumePassesOverDamage checks that a resume uses the newest intact checkpoint and reports
// each damaged one that it skips.
func TestResumePassesOverDamage(t *testing.T) {
	t.Parallel()
	c := keeping(t, 6)
	c.SaveEvery = 2
	want := runOf(t, c)
	require.NoError(t, os.Remove(filepath.Join(c.Checkpoint, "step-00000006", "manifest.json")))
	m, err := checkpoint.ReadManifest(filepath.Join(c.Checkpoint, "step-00000004"))
	require.NoError(t, err)
	require.NoError(t, os.Truncate(filepath.Join(c.Checkpoint, "step-00000004", m.Files[0].Name), 9))
	var told []string
	c.Resume, c.Warn = true, func(line string) { told = append(told, line) }
	got := runOf(t, c)
	require.Equal(t, want.sha, got.sha)
	require.Equal(t, want.losses[2:], got.losses)
	require.Len(t, told, 2)
	require.Contains(t, told[0], "step-00000006 is passed over: ")
	require.Contains(t, told[0], "manifest.json is missing")
	require.Contains(t, told[1], m.Files[0].Name+" has 9 bytes")
	require.Equal(t, []string{".spillway-marks", "step-00000002", "step-00000004", "step-00000004.2", "step-00000006", "step-00000006.2"}, names(t, c.Checkpoint))
}

// TestResumeWantsEveryState writes a checkpoint with a valid checksum that lacks one of the
// optimizer's states. A resume must skip it with one warning.
func TestResumeWantsEveryState(t *testing.T) {
	t.Parallel()
	c := keeping(t, 2)
	c.SaveEvery = 1
	ended(t, c)
	folder := filepath.Join(c.Checkpoint, "step-00000002")
	require.NoError(t, os.Rename(folder, folder+"-old"))
	s, err := checkpoint.Open(c.Checkpoint, checkpoint.Options{})
	require.NoError(t, err)
	m, err := checkpoint.ReadManifest(folder + "-old")
	require.NoError(t, err)
	config, err := os.ReadFile(filepath.Join(folder+"-old", "config.json"))
	require.NoError(t, err)
	openedOLD, err := checkpoint.OpenCheckpoint(folder + "-old")
	require.NoError(t, err)
	old, err := openedOLD.States()
	require.NoError(t, err)
	defer old.Close()
	part := &checkpoint.Part{Of: 1}
	var tensors []checkpoint.Tensor
	for _, tensor := range m.Tensors {
		tensor.States = []string{"model", "exp_avg"}
		tensors = append(tensors, tensor)
		for _, state := range tensor.States {
			part.Extents = append(part.Extents, checkpoint.Extent{State: state, Tensor: tensor.Name, N: tensor.Elements(state), DType: safetensors.F32})
		}
	}
	part.Read = func(i int, off int64, dst []byte) error {
		b, err := old.Bytes(part.Extents[i].State, part.Extents[i].Tensor)
		copy(dst, b[off:])
		return err
	}
	_, err = s.Save(context.Background(), checkpoint.Manifest{Step: 2, Run: m.Run, Tensors: tensors}, []*checkpoint.Part{part}, []checkpoint.Blob{{Name: "config.json", Data: config}})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	var told []string
	c.Resume, c.Steps, c.Warn = true, 3, func(line string) { told = append(told, line) }
	ended(t, c)
	require.Len(t, told, 1)
	require.Contains(t, told[0], "step-00000002 holds no exp_avg_sq")
}

// TestInitRefusesNonFinite checks that non-finite weights are refused, and that the error names the
// tensor.
func TestInitRefusesNonFinite(t *testing.T) {
	t.Parallel()
	for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1))} {
		dir := rewrite(t, "../testdata/gpt2", func(*safetensors.Tensor) bool { return true })
		path := filepath.Join(dir, "model.safetensors")
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		bits := math.Float32bits(bad)
		copy(text[len(text)-4:], []byte{byte(bits), byte(bits >> 8), byte(bits >> 16), byte(bits >> 24)})
		require.NoError(t, os.WriteFile(path, text, 0o644))
		r, err := safetensors.Open(path)
		require.NoError(t, err)
		last := r.Tensors()[len(r.Tensors())-1]
		require.NoError(t, r.Close())
		c := tiny("gpt2")
		c.Init = dir
		refused(t, c, fmt.Sprintf("tensor %q: 1 of %d values are not finite, first element %d", last.Name, last.Elements(), last.Elements()-1))
	}
}

// TestACheckpointFolderIsAModel checks that Model and Init accept a run's checkpoint folder and use
// its newest intact checkpoint.
func TestACheckpointFolderIsAModel(t *testing.T) {
	t.Parallel()
	c := keeping(t, 4)
	c.SaveEvery = 2
	want := runOf(t, c).sha
	sha := func(init string) string {
		d := tiny("gpt2")
		d.Model, d.Init = c.Checkpoint, init
		tr, err := d.start(context.Background())
		require.NoError(t, err)
		defer func() { require.NoError(t, tr.Close()) }()
		got, err := tr.ParamsSHA256()
		require.NoError(t, err)
		return got
	}
	require.Equal(t, want, sha(c.Checkpoint))
	newest := newestOf(t, c.Checkpoint).Folder
	require.Equal(t, want, sha(newest))
	m, err := checkpoint.ReadManifest(newest)
	require.NoError(t, err)
	path := filepath.Join(newest, m.Files[0].Name)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	text[m.Files[0].Header] ^= 1 // of the first parameter
	require.NoError(t, os.WriteFile(path, text, 0o644))
	require.NotEqual(t, want, sha(c.Checkpoint), "the one before")
	d := tiny("gpt2")
	d.Init = newest
	_, err = d.start(context.Background())
	require.ErrorIs(t, err, checkpoint.ErrDamaged)
	require.ErrorContains(t, err, path)
}

// TestResumeFromVersion1 checks that checkpoints of layout version 1 resume, with a note about
// missing information.
func TestResumeFromVersion1(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Model, c.Init, c.Data = "../checkpoint/testdata/v1/step-00000007", "random", "../testdata/text.txt"
	c.Steps, c.Seq, c.Batch, c.Resume, c.Checkpoint, c.Keep = 10, 8, 1, true, scratch(t), 1
	require.NoError(t, os.CopyFS(c.Checkpoint, os.DirFS("../checkpoint/testdata/v1")))
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	require.Equal(t, 7, tr.Done())
	require.Len(t, tr.Notes(), 1)
	require.Contains(t, tr.Notes()[0], "step-00000007 does not say which data")
	require.NoError(t, tr.Run(context.Background(), nil))
	require.NoError(t, tr.Close())
	require.Equal(t, []string{".spillway-marks", "step-00000007", "step-00000010"}, names(t, c.Checkpoint))
}

// TestANonFiniteStateIsNotSaved checks that a save looks for non-finite values of the last update,
// which no later step would detect. A new start with the same settings is refused, with or without
// an earlier checkpoint.
func TestANonFiniteStateIsNotSaved(t *testing.T) {
	t.Parallel()
	c := keeping(t, 1)
	c.LR = 1e39 // exceeds float32
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	var odd *Diverged
	require.ErrorAs(t, tr.Run(context.Background(), nil), &odd)
	require.True(t, odd.Update)
	_, err = tr.Save(context.Background())
	require.ErrorAs(t, err, &odd, "it stays so")
	require.NoError(t, tr.Close())
	require.Equal(t, []string{".spillway-marks"}, names(t, c.Checkpoint))
	c.Resume = true
	refused(t, c, "non-finite at step 1, and from the start")
	d := c
	d.LR = 1e-3
	ended(t, d)
	c.Steps = 2
	tr, err = c.start(context.Background())
	require.NoError(t, err, "it is past that step")
	require.ErrorAs(t, tr.Run(context.Background(), nil), &odd)
	require.NoError(t, tr.Close())
	refused(t, c, "non-finite at step 2, and from step-00000001")
	require.Equal(t, []string{".spillway-marks", "step-00000001"}, names(t, c.Checkpoint))
}

// TestCheckpointsInAModelFolderAreRefused checks that a checkpoint folder in or below a model's
// folder, or reached through a link, is refused.
func TestCheckpointsInAModelFolderAreRefused(t *testing.T) {
	t.Parallel()
	model, link := t.TempDir(), filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.CopyFS(model, os.DirFS("../testdata/gpt2")))
	require.NoError(t, os.Symlink(model, link))
	unknown, adapters, deep := t.TempDir(), t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(unknown, "config.json"), []byte(`{"model_type": "of another program"}`), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(adapters, "adapter_config.json"), []byte(`{"peft_type": "LORA"}`), 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(model, "in"), 0o700))
	require.NoError(t, os.Symlink(filepath.Join(model, "in"), filepath.Join(deep, "in")))
	for _, dir := range []string{model, filepath.Join(model, "a", "b"), link, filepath.Join(link, "ck"), unknown, adapters, deep + "/in/../ck"} {
		c := keeping(t, 2)
		c.Checkpoint = dir
		refused(t, c, "is a model's folder", "give a folder outside it")
	}
	require.NoDirExists(t, filepath.Join(model, "a"))
	beside := keeping(t, 2)
	beside.Checkpoint = filepath.Join(t.TempDir(), "ck")
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(beside.Checkpoint), "config.json"), []byte(`{"name": "of something else"}`), 0o600))
	ended(t, beside)
}
