package checkpoint

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/safetensors"
)

func state(name string, v ...float32) State {
	return State{
		Name:    name,
		Tensors: []safetensors.Tensor{{Name: "w", DType: safetensors.F32, Shape: []int64{int64(len(v))}}},
		Stream: func(_ string, sink func(int64, []float32) error) error {
			half := len(v) / 2
			if err := sink(0, v[:half]); err != nil {
				return err
			}
			return sink(int64(half), v[half:])
		},
	}
}

func readBack(t *testing.T, folder, name string, n int) []float32 {
	r, err := OpenState(folder, name)
	require.NoError(t, err)
	defer r.Close()
	v := make([]float32, n)
	require.NoError(t, r.ReadFloat32("w", 0, v))
	return v
}

func TestSaveListVerify(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ckpt")
	list, err := List(dir)
	require.NoError(t, err)
	require.Empty(t, list)

	for step := 1; step <= 3; step++ {
		_, err := Save(dir, Manifest{Step: step, Ranks: 2, Zero: 3}, []State{state("model", float32(step), 2, 3), state("exp_avg", 5, 6, 7)}, func(folder string) error {
			return os.WriteFile(filepath.Join(folder, "config.json"), []byte("{}"), 0o644)
		})
		require.NoError(t, err)
	}
	list, err = List(dir)
	require.NoError(t, err)
	require.Len(t, list, 3)
	m, err := Verify(list[2])
	require.NoError(t, err)
	require.Equal(t, 3, m.Step)
	require.Len(t, m.Files, 3)
	require.Equal(t, []float32{3, 2, 3}, readBack(t, list[2], "model", 3))

	require.NoError(t, Prune(dir, 2))
	list, err = List(dir)
	require.NoError(t, err)
	require.Len(t, list, 2)
	require.Equal(t, "step-00000002", filepath.Base(list[0]))
}

func TestAFailedSaveLeavesTheOneBefore(t *testing.T) {
	dir := t.TempDir()
	_, err := Save(dir, Manifest{Step: 7}, []State{state("model", 1, 2)}, nil)
	require.NoError(t, err)
	boom := errors.New("boom")
	broken := state("model", 3, 4)
	broken.Stream = func(_ string, sink func(int64, []float32) error) error {
		if err := sink(0, []float32{3}); err != nil {
			return err
		}
		return boom
	}
	_, err = Save(dir, Manifest{Step: 7}, []State{broken}, nil)
	require.ErrorIs(t, err, boom)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing but the checkpoint before")
	_, err = Verify(filepath.Join(dir, "step-00000007"))
	require.NoError(t, err)
	require.Equal(t, []float32{1, 2}, readBack(t, filepath.Join(dir, "step-00000007"), "model", 2))
}

// What a process killed at the worst moments leaves behind.
func TestRemainsOfKilledSaves(t *testing.T) {
	dir := t.TempDir()
	_, err := Save(dir, Manifest{Step: 1}, []State{state("model", 1, 2)}, nil)
	require.NoError(t, err)
	// killed while writing
	require.NoError(t, os.MkdirAll(filepath.Join(dir, tempPrefix+"step-00000002"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, tempPrefix+"step-00000002", "model.safetensors"), []byte("half"), 0o644))
	// killed between the two renames of a replacement
	require.NoError(t, os.Rename(filepath.Join(dir, "step-00000001"), filepath.Join(dir, tempPrefix+"old-step-00000001")))
	list, err := List(dir)
	require.NoError(t, err)
	require.Len(t, list, 1)
	_, err = Verify(list[0])
	require.NoError(t, err)
}

func TestVerifyNamesTheDamagedFile(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"flipped": func(p string) error {
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			b[len(b)-1] ^= 1
			return os.WriteFile(p, b, 0o644)
		},
		"truncated": func(p string) error { return os.Truncate(p, 10) },
		"missing":   os.Remove,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			folder, err := Save(dir, Manifest{Step: 1}, []State{state("model", 1, 2)}, nil)
			require.NoError(t, err)
			require.NoError(t, damage(filepath.Join(folder, "model.safetensors")))
			_, err = Verify(folder)
			require.ErrorIs(t, err, ErrDamaged)
			require.ErrorContains(t, err, "model.safetensors")
		})
	}
}

// No flipped bit of a manifest goes unseen, unless it changes nothing.
func TestManifestChecksItself(t *testing.T) {
	dir := t.TempDir()
	folder, err := Save(dir, Manifest{Step: 12, Ranks: 3, Run: json.RawMessage(`{"optimizer": "adamw"}`)}, nil, nil)
	require.NoError(t, err)
	want, err := ReadManifest(folder)
	require.NoError(t, err)
	path := filepath.Join(folder, manifestName)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for i := range text {
		for bit := range 8 {
			text[i] ^= 1 << bit
			require.NoError(t, os.WriteFile(path, text, 0o644))
			if got, err := ReadManifest(folder); err == nil {
				require.Equal(t, want, got, "bit %d of byte %d", bit, i)
			}
			text[i] ^= 1 << bit
		}
	}
}
