package spillway

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// TestMain keeps what a user has measured on this machine, and the user's caches,
// out of the tests and the tests out of those.
func TestMain(m *testing.M) {
	os.Exit(inAWorldOfItsOwn(m))
}

func inAWorldOfItsOwn(m *testing.M) int {
	dir, err := os.MkdirTemp("", "spillway-world-")
	if err == nil {
		defer os.RemoveAll(dir)
		err = os.Setenv("XDG_CONFIG_HOME", filepath.Join(dir, "config"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}
