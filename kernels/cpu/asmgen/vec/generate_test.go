package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The committed assembly is what the descriptions give. After a change run
// go generate in package kernels/cpu/vec.
func TestCommittedFilesAreCurrent(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "vec")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for set := range sets {
		dir := t.TempDir()
		names := []string{"table_" + set + "_amd64.go", set + "_amd64.s", set + "_amd64.go"}
		cmd := exec.Command(bin, "-set", set, "-pkg", "vec", "-table", filepath.Join(dir, names[0]),
			"-out", filepath.Join(dir, names[1]), "-stubs", filepath.Join(dir, names[2]))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("set %s: %v\n%s", set, err, out)
		}
		for _, name := range names {
			want, got := body(t, filepath.Join("../../vec", name)), body(t, filepath.Join(dir, name))
			if want != got {
				t.Errorf("%s is not what the generator gives", name)
			}
		}
	}
}

// body is a file without its first line, which names the command.
func body(t *testing.T, name string) string {
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "\n")
	return rest
}
