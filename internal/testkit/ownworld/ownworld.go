// Package ownworld isolates a test process, and the processes that it starts, from the user's
// configuration, caches and home folder.
package ownworld

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"testing"

	"github.com/spillway-ml/spillway/internal/userdir"
)

const (
	// CacheVar names the folder of the tests' caches, such as compiled kernels, which are kept
	// after the go command ends. If it is not set, they are in Go's build cache; see kept.
	CacheVar = "SPILLWAY_TEST_CACHE"

	// worldVar tells child processes the folder in which they were started.
	worldVar = "SPILLWAY_TEST_WORLD"
)

// gcPercent is the value for debug.SetGCPercent in tests, unless GOGC is set. Tests use a few MB of
// heap. With Go's default of 100 it was collected fifty times a second, which woke all threads of
// their ranks each time.
const gcPercent = 800

// goVars are the variables that the go command, which some tests run, keeps from the user: its
// settings, caches and modules.
var goVars = []string{"GOENV", "GOPATH", "GOCACHE", "GOMODCACHE"}

// Run is m.Run with HOME and the folders of configuration and caches in an empty temporary folder,
// which is removed afterwards. A TestMain needs nothing else:
//
//	func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }
func Run(m *testing.M) int {
	CollectLess()
	leave, err := enter()
	if err != nil {
		fmt.Fprintln(os.Stderr, "a world for the tests:", err)
		return 1
	}
	defer leave()
	return m.Run()
}

// ManyAtOnce makes more tests run in parallel than there are processors, unless the command line
// gives a number. It is for packages whose parallel tests mostly wait. Call it before Run.
func ManyAtOnce() {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if n := max(8, runtime.GOMAXPROCS(0)); !given {
		if err := flag.Set("test.parallel", strconv.Itoa(n)); err != nil {
			panic(err) // testing has the flag
		}
	}
}

// CollectLess sets gcPercent. A test binary that becomes another program calls it instead of Run.
func CollectLess() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

func enter() (leave func(), err error) {
	if home := os.Getenv("HOME"); home != "" && os.Getenv(worldVar) == home {
		return adopt() // the parent of this process is a test, which has a world
	}
	// The cache's path is from the old environment, so resolve it before the environment changes.
	cache := os.Getenv(CacheVar)
	if cache != "" {
		if cache, err = filepath.Abs(cache); err != nil {
			return nil, err
		}
	}
	vars := goSettings()
	dir, err := os.MkdirTemp("", "spillway-world-")
	if err != nil {
		return nil, err
	}
	if cache == "" {
		cache = kept(vars["GOCACHE"], dir)
	}
	config := filepath.Join(dir, "config")
	for name, value := range map[string]string{
		"HOME": dir, "XDG_CONFIG_HOME": config, "XDG_CACHE_HOME": cache, "XDG_DATA_HOME": filepath.Join(dir, "data"),
		"USERPROFILE": dir, "AppData": config, "LocalAppData": cache, worldVar: dir,
	} {
		vars[name] = value
	}
	for name, value := range vars {
		if err := os.Setenv(name, value); err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	undo, err := adopt()
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return func() { undo(); _ = os.RemoveAll(dir) }, nil
}

// kept returns the folder for the caches of all test binaries, in the go command's build cache.
// Compiling the GPU's kernels for the CPU takes half a minute, several packages need the same ones,
// and their names contain hashes of their sources. Without a go command the folder is in the world
// and is removed with it.
func kept(goCache, world string) string {
	if filepath.IsAbs(goCache) { // "off" if there is none
		return filepath.Join(goCache, "spillway-tests")
	}
	return filepath.Join(world, "cache")
}

// world holds the folders of this process's world.
var world userdir.Folders

// adopt makes the folders that the environment names now the user's folders. It reads these
// variables before go test records which ones a test reads.
func adopt() (undo func(), err error) {
	for _, folder := range []struct {
		to   *string
		from func() (string, error)
	}{{&world.Home, os.UserHomeDir}, {&world.Config, os.UserConfigDir}, {&world.Cache, os.UserCacheDir}} {
		if *folder.to, err = folder.from(); err != nil {
			return nil, err
		}
	}
	return userdir.Use(world), nil
}

// Config replaces the user's configuration folder until the test ends, also for processes that it
// starts. With "" there is none.
func Config(t testing.TB, dir string) {
	t.Helper()
	other := world
	other.Config = dir
	t.Cleanup(userdir.Use(other))
	set := func(dir string) {
		for _, name := range []string{"XDG_CONFIG_HOME", "AppData"} {
			if err := os.Setenv(name, dir); err != nil {
				t.Error(err)
			}
		}
	}
	set(dir)
	t.Cleanup(func() { set(world.Config) })
}

// goSettings returns the go command's values of goVars. It returns none without a go command, as
// when a test binary runs on another machine.
func goSettings() map[string]string {
	vars := map[string]string{}
	out, err := exec.Command("go", append([]string{"env", "-json"}, goVars...)...).Output()
	if err != nil || json.Unmarshal(out, &vars) != nil {
		return map[string]string{}
	}
	for name, value := range vars {
		if value == "" {
			delete(vars, name)
		}
	}
	return vars
}
