// Command packkernels compiles the GPU's kernels with the NVRTC in a folder, using all cores, and
// writes the files that a release embeds:
//
//	go run ./internal/testkit/packkernels -nvrtc DIR -arch sm_80,sm_90 [-o kernels/cuda/images/packed]
//
// Sources compiled before come from the cache. -again N compiles N of the images again and compares
// them.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/device/cuda/dynlib"
	"github.com/spillway-ml/spillway/internal/aside"
	"github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/images"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
)

// job is a source to compile for an architecture.
type job struct{ source, arch string }

func main() {
	var (
		libs  = flag.String("nvrtc", "", "folder of NVRTC; empty: where train finds it")
		archs = flag.String("arch", "sm_80,sm_90", "architectures, separated by commas: sm_90 is machine code, compute_80 PTX")
		cache = flag.String("cache", "", "folder of what was compiled; empty: the user's; -: none")
		out   = flag.String("o", "", "write the files of the architectures into this folder")
		again = flag.Int("again", 0, "compile so many of the images anew and compare; -1: all")
		seed  = flag.Uint64("seed", 1, "of which images are compiled anew")
		one   = flag.String("one", "", "compile this source for -arch, and no more")
	)
	flag.Parse()
	if err := run(*libs, *archs, *cache, *out, *one, *again, *seed); err != nil {
		fmt.Fprintln(os.Stderr, "pack:", err)
		os.Exit(1)
	}
}

func run(libs, archs, cache, out, one string, again int, seed uint64) error {
	if libs != "" {
		if err := os.Setenv(dynlib.Env, libs); err != nil {
			return err
		}
	}
	c, err := nvrtc.Open(nvrtc.Options{Cache: cache, Warn: func(s string) { fmt.Fprintln(os.Stderr, s) }})
	if err != nil {
		return err
	}
	if one != "" {
		_, err := compile(c, job{one, archs})
		return err
	}
	var jobs []job
	for _, arch := range strings.Split(archs, ",") {
		for _, source := range cuda.Sources() {
			jobs = append(jobs, job{source, arch})
		}
	}
	start := time.Now()
	if err := inProcesses(jobs, libs, cache); err != nil {
		return err
	}
	fmt.Printf("NVRTC %s: %d images of %s in %.1f s\n", c.Version(), len(jobs), archs, time.Since(start).Seconds())
	if err := compare(c, jobs, again, seed); err != nil || out == "" {
		return err
	}
	return write(c, jobs, out)
}

func compile(c *nvrtc.Compiler, j job) ([]byte, error) {
	text, err := cuda.Source(j.source)
	if err != nil {
		return nil, err
	}
	return c.CompileFor(j.source, text, j.arch)
}

// inProcesses compiles into the cache with one process per core, because NVRTC compiles one source
// at a time in a process.
func inProcesses(jobs []job, libs, cache string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	todo := make(chan job)
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for j := range todo {
				text, err := exec.CommandContext(ctx, self, "-nvrtc", libs, "-cache", cache, "-arch", j.arch, "-one", j.source).CombinedOutput()
				if err != nil {
					cancel(fmt.Errorf("%s for %s: %w\n%s", j.source, j.arch, err, text))
				}
			}
		})
	}
	for _, j := range jobs {
		todo <- j
	}
	close(todo)
	workers.Wait()
	return context.Cause(ctx)
}

// compare compiles some images without the cache and requires that they are the same.
func compare(c *nvrtc.Compiler, jobs []job, n int, seed uint64) error {
	if n == 0 {
		return nil
	}
	fresh, err := nvrtc.Open(nvrtc.Options{Cache: "-"})
	if err != nil {
		return err
	}
	order := rand.New(rand.NewPCG(seed, 0)).Perm(len(jobs))
	if n > 0 {
		order = order[:min(n, len(order))]
	}
	for _, i := range order {
		kept, err := compile(c, jobs[i])
		if err != nil {
			return err
		}
		anew, err := compile(fresh, jobs[i])
		if err != nil {
			return err
		}
		if !bytes.Equal(kept, anew) {
			return fmt.Errorf("%s for %s: compiled again, the image differs from the kept one", jobs[i].source, jobs[i].arch)
		}
	}
	fmt.Printf("%d of them compiled again, with equal bytes (seed %d)\n", len(order), seed)
	return nil
}

func write(c *nvrtc.Compiler, jobs []job, out string) error {
	by := map[string][]images.Image{}
	for _, j := range jobs {
		code, err := compile(c, j)
		if err != nil {
			return err
		}
		text, err := cuda.Source(j.source)
		if err != nil {
			return err
		}
		by[j.arch] = append(by[j.arch], images.Image{Source: j.source, Hash: images.Hash(text), Code: code})
	}
	for arch, list := range by {
		file, err := images.Pack(list)
		if err != nil {
			return err
		}
		path := filepath.Join(out, arch+".tar.zst")
		if err := os.MkdirAll(out, 0o755); err != nil {
			return err
		}
		if err := aside.WriteBytes(path, file, 0o644); err != nil {
			return err
		}
		fmt.Printf("%s: %d bytes\n", path, len(file))
	}
	return nil
}
