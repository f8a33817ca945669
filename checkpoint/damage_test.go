package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// flip changes one bit of the byte at offset at; a negative offset counts from the end.
func flip(t *testing.T, path string, at int) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	if at < 0 {
		at += len(text)
	}
	text[at] ^= 0x10
	require.NoError(t, os.WriteFile(path, text, 0o644))
}

// twoSteps returns a folder with checkpoints of steps 1 and 2.
func twoSteps(t *testing.T) (dir, older, newer string) {
	dir = t.TempDir()
	s := open(t, dir, Options{})
	older, newer = save(t, s, 1), save(t, s, 2)
	require.NoError(t, s.Close())
	return dir, older, newer
}

// chosen asserts that the newer checkpoint of twoSteps is found damaged, that the error names file,
// and that Choose returns the older one.
func chosen(t *testing.T, dir, file string) {
	t.Helper()
	_, err := Verify(background, filepath.Join(dir, "step-00000002"))
	require.ErrorIs(t, err, ErrDamaged)
	require.ErrorContains(t, err, file)
	c, err := Choose(background, dir, nil)
	require.NoError(t, err)
	require.Equal(t, "step-00000001", c.Name)
	require.Len(t, c.Passed, 1)
	require.Equal(t, "step-00000002", c.Passed[0].Name)
	require.ErrorContains(t, c.Passed[0].Why, file)
}

var fileNames = []string{"config.json", momentFile, "manifest.json", modelFile}

// TestAnyByteFlipped flips each byte of each file in turn; Verify must find it and name the file.
func TestAnyByteFlipped(t *testing.T) {
	dir, _, newer := twoSteps(t)
	for _, name := range fileNames {
		path := filepath.Join(newer, name)
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for i := range text {
			if text[i] == ' ' && i%101 > 0 { // the file of a rank has thousands of spaces before its data
				continue
			}
			flip(t, path, i)
			_, err := Verify(background, newer)
			require.ErrorIs(t, err, ErrDamaged, "%s, byte %d", name, i)
			require.ErrorContains(t, err, name)
			flip(t, path, i)
		}
		flip(t, path, len(text)/2)
		chosen(t, dir, name)
		flip(t, path, len(text)/2)
		_, err = Verify(background, newer)
		require.NoError(t, err)
	}
}

func cut(path string, n int64) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	return os.Truncate(path, st.Size()-n)
}

func TestAFileAdded(t *testing.T) {
	dir, _, newer := twoSteps(t)
	require.NoError(t, os.WriteFile(filepath.Join(newer, "rank-00002-of-00002.safetensors"), nil, 0o644))
	chosen(t, dir, "rank-00002-of-00002.safetensors is not in its manifest")
}

// TestAFileUnlisted checks that a manifest with a valid checksum that omits a file is reported as
// damaged.
func TestAFileUnlisted(t *testing.T) {
	dir, _, newer := twoSteps(t)
	m, err := ReadManifest(newer)
	require.NoError(t, err)
	for i, f := range m.Files {
		if f.Name == momentFile {
			m.Files = append(m.Files[:i:i], m.Files[i+1:]...)
			break
		}
	}
	seal(t, newer, m)
	chosen(t, dir, momentFile)
}

func seal(t *testing.T, folder string, m Manifest) {
	t.Helper()
	text, err := m.text()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(folder, manifestName), text, 0o644))
}

func TestARenamedFolder(t *testing.T) {
	dir, older, newer := twoSteps(t)
	require.NoError(t, os.Rename(newer, filepath.Join(dir, "step-00000009")))
	c, err := Choose(background, dir, nil)
	require.NoError(t, err)
	require.Equal(t, older, c.Folder)
	require.ErrorContains(t, c.Passed[0].Why, "step-00000009 says step 2 in its manifest")
	require.NoError(t, os.RemoveAll(older))
	_, err = Choose(background, dir, nil)
	require.ErrorIs(t, err, ErrDamaged, "none is whole")
	require.ErrorContains(t, err, "step-00000009")
}

// TestManifestsOfIllWill checks that manifests with a valid checksum but invalid content are
// rejected.
func TestManifestsOfIllWill(t *testing.T) {
	for what, change := range map[string]func(*Manifest){
		"..":              func(m *Manifest) { m.Files[0].Name = ".." },
		"a path":          func(m *Manifest) { m.Files[0].Name = "../x" },
		"an absolute one": func(m *Manifest) { m.Files[0].Name = "/etc/passwd" },
		"none":            func(m *Manifest) { m.Files[0].Name = "" },
		"itself":          func(m *Manifest) { m.Files[0].Name = manifestName },
		"twice":           func(m *Manifest) { m.Files[0].Name = m.Files[1].Name },
		"a negative size": func(m *Manifest) { m.Files[0].Bytes = -1 },
		"no run":          func(m *Manifest) { m.Owner = "" },
		"version 0":       func(m *Manifest) { m.Version = 0 },
		"version -1":      func(m *Manifest) { m.Version = -1 },
		"a long header":   func(m *Manifest) { m.Files[0].Header = m.Files[0].Bytes + 1 },
		"no shape":        func(m *Manifest) { m.Tensors[0].Shape = []int64{0} },
		"a huge one":      func(m *Manifest) { m.Tensors[0].Shape = []int64{1 << 40, 1 << 40} },
		"a tensor twice":  func(m *Manifest) { m.Tensors = append(m.Tensors, m.Tensors[0]) },
	} {
		dir, _, newer := twoSteps(t)
		m, err := ReadManifest(newer)
		require.NoError(t, err)
		change(&m)
		seal(t, newer, m)
		_, err = ReadManifest(newer)
		require.ErrorIs(t, err, ErrDamaged, what)
		chosen(t, dir, manifestName)
	}
}

// TestALaterVersion checks that an intact checkpoint of a later version gives ErrNewer, not
// ErrDamaged. Falling back to an older checkpoint would lose the newer one silently.
func TestALaterVersion(t *testing.T) {
	dir, _, newer := twoSteps(t)
	m, err := ReadManifest(newer)
	require.NoError(t, err)
	m.Version = Version + 1
	seal(t, newer, m)
	_, err = Choose(background, dir, nil)
	require.ErrorIs(t, err, ErrNewer)
	require.NotErrorIs(t, err, ErrDamaged)
}

func TestVerifyEndsWhenTold(t *testing.T) {
	_, _, newer := twoSteps(t)
	ctx, cancel := context.WithCancel(background)
	cancel()
	_, err := Verify(ctx, newer)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, ErrDamaged)
	_, err = Choose(ctx, filepath.Dir(newer), nil)
	require.ErrorIs(t, err, context.Canceled)
}

// take returns the folder of the checkpoint that Take opens, or path if there is none.
func take(t *testing.T, path string, only ...string) (string, []Pass, error) {
	c, passed, err := Take(background, filesys.System, path, only...)
	if err != nil || c == nil {
		return path, passed, err
	}
	require.NoError(t, c.Close())
	return c.Folder, passed, nil
}

// TestTake checks that Take opens the newest checkpoint of a run's folder, and a checkpoint by its
// own path.
func TestTake(t *testing.T) {
	dir, older, newer := twoSteps(t)
	for path, want := range map[string]string{dir: newer, newer: newer, older: older, "testdata": "testdata", "nowhere": "nowhere"} {
		got, passed, err := take(t, path)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Empty(t, passed)
	}
	flip(t, filepath.Join(newer, momentFile), -1)
	got, _, err := take(t, dir, "config.json", safetensors.FileName)
	require.NoError(t, err)
	require.Equal(t, newer, got, "only what is used is verified")
	got, passed, err := take(t, dir)
	require.NoError(t, err)
	require.Equal(t, older, got)
	require.Len(t, passed, 1)
	_, _, err = take(t, newer)
	require.ErrorIs(t, err, ErrDamaged)
}

// TestSmallFilesAreAlwaysCompared checks that files without tensors, such as config.json, are
// always verified. If one is damaged, Take returns an older checkpoint of the folder.
func TestSmallFilesAreAlwaysCompared(t *testing.T) {
	dir, older, newer := twoSteps(t)
	flip(t, filepath.Join(newer, "config.json"), 0)
	for _, only := range [][]string{{AsLoaded}, {safetensors.FileName}, {"none.json"}, nil} {
		got, passed, err := take(t, dir, only...)
		require.NoError(t, err)
		require.Equal(t, older, got)
		require.Len(t, passed, 1)
		_, _, err = take(t, newer, only...)
		require.ErrorIs(t, err, ErrDamaged)
		require.ErrorContains(t, err, filepath.Join(newer, "config.json"))
	}
}

// TestADamagedManifestUnderAnotherName checks that a copied checkpoint is recognized even if its
// manifest is damaged or missing. A model's folder with an unrelated manifest.json is not a
// checkpoint.
func TestADamagedManifestUnderAnotherName(t *testing.T) {
	_, _, newer := twoSteps(t)
	for what, damage := range map[string]func(folder string) error{
		"a flipped bit": func(folder string) error { flip(t, filepath.Join(folder, manifestName), 20); return nil },
		"empty":         func(folder string) error { return os.Truncate(filepath.Join(folder, manifestName), 0) },
		"missing":       func(folder string) error { return os.Remove(filepath.Join(folder, manifestName)) },
		"of whole tensors": func(folder string) error {
			for _, name := range []string{modelFile, momentFile} {
				require.NoError(t, os.Rename(filepath.Join(folder, name), filepath.Join(folder, name[:4]+name[10:])))
			}
			flip(t, filepath.Join(folder, manifestName), 20)
			return nil
		},
	} {
		folder := filepath.Join(t.TempDir(), "copy")
		require.NoError(t, os.CopyFS(folder, os.DirFS(newer)))
		require.NoError(t, damage(folder))
		e, ok := Stat(folder)
		require.True(t, ok, what)
		require.ErrorIs(t, e.Err, ErrDamaged, what)
		_, _, err := take(t, folder, AsLoaded)
		require.ErrorIs(t, err, ErrDamaged, what)
		require.ErrorContains(t, err, filepath.Join(folder, manifestName), what)
	}
	model := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(model, "config.json"), []byte("{}"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(model, manifestName), []byte(`{"name": "an app"}`), 0o644))
	_, ok := Stat(model)
	require.False(t, ok)
	folder, _, err := take(t, model, AsLoaded)
	require.NoError(t, err)
	require.Equal(t, model, folder)
}

// TestVersion1 checks that checkpoints of layout version 1 can be read, and that any flipped byte
// of their manifest is found.
func TestVersion1(t *testing.T) {
	const folder = "testdata/v1/step-00000007"
	m, err := Verify(background, folder)
	require.NoError(t, err)
	require.Equal(t, 1, m.Version)
	require.Equal(t, 7, m.Step)
	require.Empty(t, m.Owner)
	require.JSONEq(t, `{"optimizer":"adamw"}`, string(m.Run))
	dir := filepath.Join(t.TempDir(), "step-00000007")
	require.NoError(t, os.CopyFS(dir, os.DirFS(folder)))
	path := filepath.Join(dir, manifestName)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for i := range text {
		flip(t, path, i)
		_, err := Verify(background, dir)
		require.ErrorIs(t, err, ErrDamaged, "byte %d", i)
		flip(t, path, i)
	}
}

func FuzzManifest(f *testing.F) {
	text, err := Manifest{Version: Version, Step: 3, Owner: "a", ID: "b", Run: []byte("{}"), Files: []File{{Name: "model.safetensors", Bytes: 3, CRC32C: "00000000"}}}.text()
	require.NoError(f, err)
	f.Add(text)
	old, err := os.ReadFile("testdata/v1/step-00000007/manifest.json")
	require.NoError(f, err)
	f.Add(old)
	f.Add([]byte(`{"version":2,"crc32c": "`))
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := parseManifest(text)
		if err != nil {
			return
		}
		require.NoError(t, m.check())
		for _, file := range m.Files {
			require.Equal(t, file.Name, filepath.Base(file.Name))
		}
	})
}

func FuzzMarks(f *testing.F) {
	line, err := mark{Event: markWorking, Name: tempPrefix + "x-0123456789abcdef0123456789abcdef"}.line()
	require.NoError(f, err)
	f.Add(line)
	line, err = mark{Event: markDiverged, Key: "k", Divergence: &Divergence{Step: 2}}.line()
	require.NoError(f, err)
	f.Add(append(line, line[:7]...))
	f.Fuzz(func(t *testing.T, text []byte) {
		m := parseMarks("marks", bytes.NewReader(text))
		require.LessOrEqual(t, m.whole, int64(len(text)))
		for _, name := range m.working {
			require.Equal(t, name, filepath.Base(name))
			require.NotEqual(t, "..", name)
		}
	})
}

func FuzzName(f *testing.F) {
	for _, s := range []string{"step-00000001", "step-00000001.2", "step-1", "step-00000001.1", "step-123456789012", "step-9999999999999999999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if step, copy, ok := parseName(s); ok {
			require.Equal(t, s, Name(step, copy))
			require.GreaterOrEqual(t, step, 0)
		}
	})
}

// TestManifestThatIsNone checks that the error for an invalid manifest names the line of the first
// fault.
func TestManifestThatIsNone(t *testing.T) {
	for text, says := range map[string]string{
		"":                          "it is empty",
		" \n":                       "it is empty",
		"{\n \"version\": 3,\n \"a": "from line 3 on (unexpected end of JSON input)",
		"{\n \"version\": x}":       "from line 2 on (invalid character 'x'",
		"{\"version\":\n \"3\"}":    "from line 2 on (\"version\" is of the kind string)",
		"[]":                        "from line 1 on (array where a save writes none)",
		"{}":                        "it does not have the checksum that it says",
	} {
		_, err := parseManifest([]byte(text))
		require.ErrorIs(t, err, ErrDamaged)
		require.ErrorContains(t, err, says, "%q", text)
		require.NotContains(t, err.Error(), "Go ")
	}
}

// TestAStrayFileIsNoDamage checks that additional files, such as those of a desktop or a network
// file system, are not damage.
func TestAStrayFileIsNoDamage(t *testing.T) {
	dir, _, newer := twoSteps(t)
	for _, name := range []string{".DS_Store", ".nfs0001.json", "notes.txt"} {
		require.NoError(t, os.WriteFile(filepath.Join(newer, name), nil, 0o644))
	}
	require.NoError(t, os.Mkdir(filepath.Join(newer, "pictures"), 0o755))
	c, err := Choose(t.Context(), dir, nil)
	require.NoError(t, err)
	require.Equal(t, newer, c.Folder)
	require.Empty(t, c.Passed)
}

// TestWhatThisProcessMayNotReadIsNoDamage checks which errors count as damage: missing files and
// I/O errors do. Missing permission and too many open files do not, so they cause no fallback to an
// older checkpoint.
func TestWhatThisProcessMayNotReadIsNoDamage(t *testing.T) {
	for err, damage := range map[error]bool{os.ErrPermission: false, syscall.EMFILE: false, syscall.EIO: true, os.ErrNotExist: true} {
		require.Equal(t, damage, errors.Is(faulty(fmt.Errorf("open x: %w", err)), ErrDamaged), err)
	}
}
