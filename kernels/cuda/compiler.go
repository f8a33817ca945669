package cuda

import (
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// Compiler compiles CUDA C to an image that driver.API.LoadModule loads.
type Compiler interface {
	// Compile compiles a source without #include lines for a device. Messages show the
	// source as name.
	Compile(name, source string, dev driver.Device) (image []byte, err error)
}

//go:embed src/*.cu src/*.cuh
var sources embed.FS

// prelude is the file at the start of every source.
const prelude = "common.cuh"

// Sources returns the names of the kernels' sources, sorted.
func Sources() []string {
	entries, err := fs.ReadDir(sources, "src")
	if err != nil {
		return nil // cannot happen: the files are embedded
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

// Source returns the full text of a source: the prelude, the header that several sources
// share (x.cuh for x_64.cu), then the file itself.
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
