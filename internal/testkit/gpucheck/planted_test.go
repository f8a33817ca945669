//go:build linux

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/testkit/blastest"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	gpuplatform "github.com/spillway-ml/spillway/platform/gpu"
)

// plantedEnv makes this test's binary a bundle's: its contact is with a double of the
// driver, and its tests are those below, three of which have something planted.
const plantedEnv = "GPUCHECK_PLANTED"

// lookLimitEnv is the bundle's lookLimit.
const lookLimitEnv = "GPUCHECK_LOOK_LIMIT"

var planted = []string{"TestFirstIsRight", "TestPlantedFault", "TestPlantedHang", "TestPlantedWrongKernel", "TestLastIsRight"}

// A bundle runs this binary as its own child and as a binary of tests.
func init() {
	standIn = func() (code int, done bool) {
		switch {
		case os.Getenv(plantedEnv) == "":
			return 0, false
		case slices.Contains(os.Args, "-child"):
			return childOnDouble(os.Getenv(plantedEnv)), true
		case !slices.ContainsFunc(os.Args, func(a string) bool { return strings.HasPrefix(a, "-test.") }):
			if limit, err := time.ParseDuration(os.Getenv(lookLimitEnv)); err == nil {
				lookLimit = limit
			}
			testLimit = 5 * time.Second // only the hang takes it
			main()                      // ends the process
			return 1, true
		case slices.Contains(os.Args, "-test.list=."):
			fmt.Println(strings.Join(planted, "\n"))
			return 0, true
		}
		return 0, false
	}
}

// unpacked reads the archive in a folder of results.
func unpacked(t *testing.T, out string) map[string][]byte {
	f, err := os.Open(filepath.Join(out, archive))
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	files := map[string][]byte{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return files
		}
		require.NoError(t, err)
		files[h.Name], err = io.ReadAll(r)
		require.NoError(t, err)
	}
}

// onPlanted is a double with a stream and memory, in the bundle's process.
func onPlanted(t *testing.T) (*drivertest.Driver, driver.Stream, driver.Address) {
	if os.Getenv(plantedEnv) == "" {
		t.Skip("runs in the bundle of TestBundleOnTheDouble")
	}
	d := drivertest.Start(t, drivertest.Options{})
	s, err := d.NewStream()
	require.NoError(t, err)
	at, err := d.Alloc(1 << 10)
	require.NoError(t, err)
	t.Cleanup(func() { _ = errors.Join(d.DestroyStream(s), d.Free(at)) }) // of a lost context too
	return d, s, at
}

// doubled is a kernel that doubles what is there, by a factor.
func doubled(t *testing.T, factor byte) {
	d, s, at := onPlanted(t)
	require.NoError(t, d.Fill8(at, 3, 1<<10, s))
	mem, err := d.Bytes(at, 1<<10)
	require.NoError(t, err)
	require.NoError(t, d.Run(s, "double", func() error {
		for i := range mem {
			mem[i] *= factor
		}
		return nil
	}))
	require.NoError(t, d.Synchronize(s))
	require.Equal(t, byte(6), mem[77], "the result differs from the CPU's")
}

func TestFirstIsRight(t *testing.T)       { doubled(t, 2) }
func TestLastIsRight(t *testing.T)        { doubled(t, 2) }
func TestPlantedWrongKernel(t *testing.T) { doubled(t, 5) }

func TestPlantedFault(t *testing.T) {
	d, s, at := onPlanted(t)
	d.FailRun(1, 700)
	require.NoError(t, d.Fill8(at, 3, 1<<10, s))
	require.NoError(t, d.Synchronize(s))
}

func TestPlantedHang(t *testing.T) {
	d, s, _ := onPlanted(t)
	p, word, err := d.HostAlloc(4)
	require.NoError(t, err)
	*(*uint32)(p) = 0
	require.NoError(t, d.WaitValue(s, word, 1))
	require.NoError(t, d.Synchronize(s))
}

// loaded gives the double an image of a kernel that does nothing.
type loaded struct{ path string }

func (l loaded) Compile(string, string, driver.Device) ([]byte, error) {
	return []byte(drivertest.ImagePrefix + l.path), nil
}

// Kernels of the double, in C: one that does nothing, and one that never ends.
const (
	noKernel      = "int shim_sum_total() { return 0; }\n"
	endlessKernel = "#include <unistd.h>\nint shim_sum_total() { for (;;) pause(); }\n"
)

// meetDouble is the first contact with a double.
func meetDouble(dir, kernel string, depth int, compiler func() (kernelscuda.Compiler, error), tell func(told)) (*drivertest.Driver, error) {
	lib, source := filepath.Join(dir, "kernel.so"), filepath.Join(dir, "kernel.c")
	if err := os.WriteFile(source, []byte(kernel+"unsigned long shim_size_sum_total() { return 36; }\n"), 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-o", lib, source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	if compiler == nil {
		compiler = func() (kernelscuda.Compiler, error) { return loaded{lib}, nil }
	}
	d := drivertest.New(drivertest.Options{Depth: depth})
	c := &contacts{api: d, bytes: 1 << 16, depth: 2000, edge: 16, tell: tell, compiler: compiler,
		products: func() (blas.Library, error) { return blastest.New(d), nil }}
	c.meet()
	return d, nil
}

// childOnDouble is a child's side in a mode: see the tests that name it.
func childOnDouble(mode string) int {
	dir, err := os.MkdirTemp("", "gpucheck-double-*")
	if err == nil {
		defer os.RemoveAll(dir)
		lines := json.NewEncoder(os.Stdout)
		tell := func(t told) { _ = lines.Encode(t) }
		switch {
		case mode == "cuInit": // the library that the environment names
			err = runChild("look", "", "", "", "")
		case slices.Contains(os.Args, "look"):
			err = lookChild(os.Stdout, drivertest.New(drivertest.Options{}))
		case mode == "no NVRTC":
			_, err = meetDouble(dir, noKernel, 0, func() (kernelscuda.Compiler, error) { return gpuplatform.Compiler(12040, nil) }, tell)
		case mode == "endless":
			_, err = meetDouble(dir, endlessKernel, 0, nil, tell)
		default:
			_, err = meetDouble(dir, noKernel, 0, nil, tell)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// The first contact makes its calls, gives all back, and measures what the double has.
func TestContactOnTheDouble(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs a C compiler")
	}
	said := map[string]told{}
	d, err := meetDouble(t.TempDir(), noKernel, 600, nil, func(s told) { said[s.What] = s })
	require.NoError(t, err)
	require.NoError(t, d.Close(), "no leak, no unordered access")
	for _, s := range said {
		require.Empty(t, s.Error, s.What)
	}
	require.Equal(t, "600, then a call waits for room", said["operations that a stream holds"].Value)
	for _, what := range []string{"cuMemcpyHtoDAsync", "cuLaunchKernel, 500 in a row", "cublasLtMatmul, 16 cubed, bf16", "cuMemGetInfo after products"} {
		require.Contains(t, said, what)
	}
}

// Copies between GPUs are measured for every two, give all back, and say which of them go
// through the host.
func TestPeersOnTheDouble(t *testing.T) {
	d := drivertest.New(drivertest.Options{Devices: 3, NoLink: func(a, b int) bool { return a+b == 1 }})
	said := map[string]told{}
	c := &contacts{api: d, bytes: 1 << 16, tell: func(s told) { said[s.What] = s }}
	c.peers()
	require.NoError(t, d.Close(), "no leak, no unordered access")
	for _, s := range said {
		require.Empty(t, s.Error, s.What)
	}
	require.Regexp(t, `^through the host, .* GB/s, .* µs for 4 KiB$`, said["GPU 0 to GPU 1"].Value)
	require.Regexp(t, `^direct, .* GB/s, .* µs for 4 KiB$`, said["GPU 2 to GPU 1"].Value)
	require.Regexp(t, `^.* GB/s together$`, said["GPUs 1 and 2, both ways at once"].Value)
	require.Len(t, said, 1+3+6+3+3)
}

// Where there is one GPU the part says so in a line; on several it compares their bits with
// those of one.
func TestPeersOfTheBundle(t *testing.T) {
	dir := t.TempDir()
	b := &bundle{dir: dir, out: dir, work: dir, device: "cuda", gpu: &gpu{count: 1}}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "logs"), 0o755))
	r := &result{}
	runPeers(t.Context(), b, r)
	require.Equal(t, skipped, r.Status)
	require.Equal(t, []string{"one GPU: it has nobody to exchange anything with"}, r.Lines)

	// It stands for a run whose bits differ on several GPUs: those that it sees go into its hash.
	script := "#!/bin/sh\nwhile [ \"$1\" != --metrics ]; do shift; done\necho '{\"step\":1,\"loss\":2}' > $2\necho '{\"event\":\"done\",\"params_sha256\":\"'$CUDA_VISIBLE_DEVICES'\"}' >> $2\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "spillway"), []byte(script), 0o755))
	t.Setenv(visible, "3,5")
	b.self, b.gpu.count = "/bin/true", 2
	r = &result{}
	runPeers(t.Context(), b, r)
	require.Contains(t, r.Lines, "2 ranks on 2 GPUs, ZeRO-0: other bits than on one")
	require.Contains(t, r.Lines, "4 ranks on 2 GPUs: 0 of 13 ways have the bits of one GPU, planned = touched")
	t.Setenv(visible, "3")
	r = &result{}
	runPeers(t.Context(), b, r)
	require.Empty(t, r.Status)
	require.Equal(t, []string{"2 ranks on 2 GPUs: 13 of 13 ways have the bits of one GPU, planned = touched", "4 ranks on 2 GPUs: 13 of 13 ways have the bits of one GPU, planned = touched"}, r.Lines)
}

// The bundle runs whole with a fault, a hang and a wrong kernel among its tests: each is
// found and named, the hang with its stacks, and everything else is reported.
func TestBundleOnTheDouble(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs a C compiler")
	}
	t.Parallel()
	dir := bundleOf(t)
	out := filepath.Join(dir, "results")
	require.NoError(t, os.Mkdir(filepath.Join(dir, "tests"), 0o755))
	require.NoError(t, os.Symlink("../gpucheck", filepath.Join(dir, "tests", "kernels_cuda.test")))
	cmd, said := runSh(t, dir, "-only", "contact,tests,wall", "-budget", "5m")
	cmd.Env = append(os.Environ(), plantedEnv+"=1")
	var exit *exec.ExitError
	require.ErrorAs(t, cmd.Run(), &exit, "%s", said)
	require.Equal(t, 1, exit.ExitCode(), "%s", said)

	var d document
	text, err := os.ReadFile(filepath.Join(out, "results.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &d))
	require.Len(t, d.Parts, 3)
	contact, tests, wall := d.Parts[0], d.Parts[1], d.Parts[2]
	require.Equal(t, passed, contact.Status, "%v", contact.Lines)
	require.Greater(t, len(contact.Table), 20)
	require.Equal(t, failedStatus, wall.Status)
	require.Contains(t, strings.Join(wall.Lines, "\n"), "no GPU to train on")

	require.Equal(t, failedStatus, tests.Status)
	require.Contains(t, tests.Lines, "2 tests passed, 0 were skipped, 3 failed")
	outcomes := map[string][]string{}
	for _, row := range tests.Table[1:] {
		outcomes[row[0]] = row
	}
	require.Len(t, outcomes, 6, "each failure, and once more alone")
	require.Contains(t, outcomes["TestPlantedFault"][3], "CUDA_ERROR_ILLEGAL_ADDRESS")
	require.Equal(t, "hangs", outcomes["TestPlantedHang, alone again"][1])
	require.Equal(t, failedStatus, outcomes["TestPlantedWrongKernel"][1])
	files := unpacked(t, out)
	log := files["results/logs/test-kernels_cuda-TestPlantedHang.txt"]
	require.Contains(t, files, "results/results.json")
	require.True(t, bytes.Contains(log, []byte("SIGQUIT")) && bytes.Contains(log, []byte("drivertest.(*Driver).Synchronize")), "%s", log)

	logs := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(logs, "logs"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(logs, "logs", "test-kernels_cuda-TestPlantedFault.txt"), files["results/logs/test-kernels_cuda-TestPlantedFault.txt"], 0o600))
	brief := d.brief(logs, 3000)
	require.LessOrEqual(t, len([]rune(brief)), 3000)
	require.Contains(t, brief, "end of logs/test-kernels_cuda-TestPlantedFault.txt")
	written, err := os.ReadDir(out)
	require.NoError(t, err)
	require.LessOrEqual(t, len(written), 8)
}
