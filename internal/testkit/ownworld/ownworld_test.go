package ownworld

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/userdir"
)

func TestMain(m *testing.M) { os.Exit(Run(m)) }

const childVar = "SPILLWAY_TEST_OWNWORLD_CHILD"

// What a user has is not seen, what is written is not the user's, and Go's own
// folders stay.
func TestTheUsersFoldersAreOutOfReach(t *testing.T) {
	if os.Getenv(childVar) == "" {
		theirs := t.TempDir()
		for _, name := range []string{"config", "cache"} {
			require.NoError(t, os.WriteFile(filepath.Join(theirs, name), []byte("garbage"), 0o400))
		}
		cmd := exec.Command(os.Args[0], "-test.run=^TestTheUsersFoldersAreOutOfReach$")
		cmd.Env = append(os.Environ(), childVar+"="+theirs, "HOME="+theirs, "USERPROFILE="+theirs, CacheVar+"=",
			"XDG_CONFIG_HOME="+filepath.Join(theirs, "config"), "XDG_CACHE_HOME="+filepath.Join(theirs, "cache"))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return
	}
	world := os.Getenv(worldVar)
	require.DirExists(t, world)
	for _, folder := range []func() (string, error){os.UserHomeDir, os.UserConfigDir, os.UserCacheDir, userdir.Home, userdir.Config, userdir.Cache} {
		dir, err := folder()
		require.NoError(t, err)
		require.True(t, dir == world || strings.HasPrefix(dir, world+string(filepath.Separator)) || dir == kept(os.Getenv("GOCACHE"), world), dir)
		require.NoError(t, os.MkdirAll(dir, 0o700))
	}
	if _, err := exec.LookPath("go"); err == nil {
		require.NotEmpty(t, os.Getenv("GOMODCACHE"))
		require.False(t, strings.HasPrefix(os.Getenv("GOMODCACHE"), world))
	}
	// A process that a test starts is in the same world.
	leave, err := enter()
	require.NoError(t, err)
	leave()
	require.Equal(t, world, os.Getenv("HOME"))
	require.DirExists(t, world)
}

func TestKept(t *testing.T) {
	for goCache, want := range map[string]string{"/gocache": "/gocache/spillway-tests", "off": "/world/cache", "": "/world/cache"} {
		require.Equal(t, filepath.FromSlash(want), kept(goCache, "/world"), goCache)
	}
}

func TestTheWorldEnds(t *testing.T) {
	t.Setenv(worldVar, "")
	t.Setenv(CacheVar, "kept")
	for _, name := range []string{"HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "USERPROFILE", "AppData", "LocalAppData"} {
		t.Setenv(name, os.Getenv(name))
	}
	leave, err := enter()
	require.NoError(t, err)
	cache, err := filepath.Abs("kept")
	require.NoError(t, err)
	require.Equal(t, cache, os.Getenv("XDG_CACHE_HOME"))
	world := os.Getenv("HOME")
	require.DirExists(t, world)
	leave()
	require.NoDirExists(t, world)
}

type pkg struct {
	ImportPath, ForTest, Dir string
	Standard                 bool
	GoFiles, Deps            []string
}

// Every package whose tests can come to a user's folders, by whatever they import,
// runs them in a world of their own.
func TestEveryTestThatCouldReachTheUserIsInAWorld(t *testing.T) {
	const module = "github.com/spillway-ml/spillway"
	cmd := exec.Command("go", "list", "-test", "-json=ImportPath,ForTest,Dir,Standard,GoFiles,Deps", "-deps", module+"/...")
	out, err := cmd.Output()
	require.NoError(t, err)
	reaches := map[string]bool{} // packages that ask for a folder of the user's
	var tests []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		switch {
		case !strings.HasPrefix(p.ImportPath, module) || p.ImportPath == module+"/internal/testkit/ownworld":
		case p.ImportPath == module+"/internal/userdir.test": // its folders are its own; ownworld stands on it
		case strings.HasSuffix(p.ImportPath, ".test"):
			tests = append(tests, p)
		case !strings.Contains(p.ImportPath, " ") && asks(t, p):
			reaches[p.ImportPath] = true
		}
	}
	require.Contains(t, reaches, module+"/internal/userdir")
	seen := 0
	for _, p := range tests {
		plain := make([]string, len(p.Deps))
		for i, dep := range p.Deps { // "a [a.test]" is a, as the tests of a have it
			plain[i], _, _ = strings.Cut(dep, " ")
		}
		for path := range reaches {
			if !slices.Contains(plain, path) {
				continue
			}
			seen++
			if !slices.Contains(plain, module+"/internal/testkit/ownworld") {
				t.Errorf("%s imports %s, which asks for a folder of the user's: give it a TestMain with ownworld.Run", p.ImportPath, path)
			}
		}
	}
	require.Greater(t, seen, 10)
}

// asks says whether a file of the package asks for a folder of the user's.
func asks(t *testing.T, p pkg) bool {
	for _, name := range p.GoFiles {
		text, err := os.ReadFile(filepath.Join(p.Dir, name))
		require.NoError(t, err)
		for _, word := range []string{"os.UserConfigDir", "os.UserCacheDir", "os.UserHomeDir", `"HOME"`, `"XDG_`} {
			if strings.Contains(string(text), word) {
				return true
			}
		}
	}
	return false
}
