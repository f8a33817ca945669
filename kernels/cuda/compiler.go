package cuda

import (
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// Compiler turns CUDA C into what driver.API.LoadModule takes.
type Compiler interface {
	// Compile compiles a source that includes nothing, for a device. The name
	// stands for it in messages.
	Compile(name, source string, dev driver.Device) (image []byte, err error)
}

//go:embed src/*.cu src/*.cuh
var sources embed.FS

// prelude is what every source starts with.
const prelude = "common.cuh"

// Sources returns the names of the kernels' sources, sorted.
func Sources() []string {
	entries, err := fs.ReadDir(sources, "src")
	if err != nil {
		return nil // embedded: cannot be
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".cu") {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names
}

// Source returns the whole text of a source: the prelude, what several sources
// share (x.cuh of x_64.cu), then the file.
func Source(name string) (string, error) {
	var b strings.Builder
	files := []string{prelude, name}
	if family, _, ok := strings.Cut(name, "_"); ok {
		if _, err := fs.Stat(sources, "src/"+family+".cuh"); err == nil {
			files = []string{prelude, family + ".cuh", name}
		}
	}
	for _, f := range files {
		text, err := sources.ReadFile("src/" + f)
		if err != nil {
			return "", fmt.Errorf("cuda: no kernel source %q", f)
		}
		fmt.Fprintf(&b, "#line 1 \"%s\"\n", f)
		b.Write(text)
	}
	return b.String(), nil
}
