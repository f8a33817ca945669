//go:build !js

package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"errors"
	"flag"
	"fmt"
	"html/template"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/zero"
)

// maxBytes is the maximum size of the folder's files as they are sent.
const maxBytes = 10_000_000

//go:embed page
var page embed.FS

func main() {
	out := flag.String("out", "build/web", "`FOLDER` to write")
	flag.Parse()
	if err := build(*out); err != nil {
		fmt.Fprintln(os.Stderr, "web:", err)
		os.Exit(1)
	}
}

// build writes the folder (the page, Go's loader and the planner) and prints the sizes. It needs
// the go command and must run in the module's folder.
func build(folder string) error {
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	planner, err := compile()
	if err != nil {
		return err
	}
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("find Go's loader: %w", err)
	}
	loader, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(root)), "lib", "wasm", "wasm_exec.js"))
	if err != nil {
		return err
	}
	worker, err := page.ReadFile("page/worker.js")
	if err != nil {
		return err
	}
	index, err := indexPage(planner)
	if err != nil {
		return err
	}
	total := 0
	for _, f := range []struct {
		name string
		text []byte
	}{{"index.html", index}, {"worker.js", worker}, {"wasm_exec.js", loader}, {"planner.wasm.gz", planner}} {
		if err := os.WriteFile(filepath.Join(folder, f.name), f.text, 0o666); err != nil {
			return err
		}
		fmt.Printf("%10d  %s\n", len(f.text), f.name)
		total += len(f.text)
	}
	fmt.Printf("%10d  bytes in all, of at most %d\n", total, maxBytes)
	if total > maxBytes {
		return errors.New("the folder is too large; look at what planning imports")
	}
	return nil
}

// compile returns the planner for browsers, compressed. The page decompresses it, so the web server
// needs no setting for its type.
func compile() ([]byte, error) {
	dir, err := os.MkdirTemp("", "spillway-web-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "planner.wasm")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", file,
		"github.com/spillway-ml/spillway/cmd/spillway/web")
	cmd.Env = append(os.Environ(), "GOOS=js", "GOARCH=wasm")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile the planner: %w\n%s", err, out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var packed bytes.Buffer
	w, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(text); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return packed.Bytes(), nil
}

// indexPage returns the page with the form, for a given planner.
func indexPage(planner []byte) ([]byte, error) {
	t, err := template.ParseFS(page, "page/index.html")
	if err != nil {
		return nil, err
	}
	data := struct {
		Models, GPUs, Optimizers []string
		Version                  string // of the planner's bytes, so that no cache mixes two builds
		MB                       string
		By                       string
	}{
		Optimizers: zero.OptimizerNames(),
		Version:    fmt.Sprintf("%x", sha256.Sum256(planner))[:12],
		MB:         fmt.Sprintf("%.1f", float64(len(planner))/1e6),
		By:         cli.VersionText(),
	}
	data.By, _, _ = strings.Cut(data.By, ",")
	for _, p := range model.Presets() {
		data.Models = append(data.Models, p.Name)
	}
	for _, g := range gpus.List() {
		data.GPUs = append(data.GPUs, g.Name)
	}
	var out bytes.Buffer
	err = t.Execute(&out, data)
	return out.Bytes(), err
}
