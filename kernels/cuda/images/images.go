// Package images holds precompiled kernels: PTX for compute capability 8.0, which any
// driver from CUDA 11.8 on translates for its GPU, and machine code for newer architectures.
// internal/testkit/packkernels makes the files. The build tag gpukernels embeds them; other
// builds have none.
package images

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/kernels/cuda"
)

// PTX is the architecture whose file holds PTX.
const PTX = "compute_80"

// cubinDriver is the oldest driver version that loads the machine code. A CUDA 12 compiler
// produced it, and every driver of CUDA 12 or later reads such files.
const cubinDriver = 12000

// Archs lists the architectures that packkernels compiles for, each with the NVRTC version
// that it requires.
var Archs = []struct{ Name, NVRTC string }{{PTX, "11.8"}, {"sm_80", "12.4"}, {"sm_90", "12.4"}}

// Image is a compiled kernel source.
type Image struct {
	Source string // name of the source
	Hash   string // Hash of the source's text
	Code   []byte
}

// Hash identifies a source's text.
func Hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// Pack encodes the images of one architecture as a file. Equal images give equal bytes.
func Pack(images []Image) ([]byte, error) {
	var plain bytes.Buffer
	w := tar.NewWriter(&plain)
	for _, m := range images {
		if err := w.WriteHeader(&tar.Header{Name: m.Source + "/" + m.Hash, Mode: 0o644, Size: int64(len(m.Code)), Format: tar.FormatUSTAR}); err != nil {
			return nil, err
		}
		if _, err := w.Write(m.Code); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithWindowSize(32<<20), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	return z.EncodeAll(plain.Bytes(), nil), nil
}

// Unpack reads what Pack wrote.
func Unpack(file []byte) ([]Image, error) {
	z, err := zstd.NewReader(bytes.NewReader(file), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(64<<20))
	if err != nil {
		return nil, err
	}
	defer z.Close()
	var list []Image
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, fmt.Errorf("embedded kernels: %w", err)
		}
		code, err := io.ReadAll(r)
		if err != nil {
			return nil, fmt.Errorf("embedded kernels: %s: %w", h.Name, err)
		}
		source, hash, _ := strings.Cut(h.Name, "/")
		list = append(list, Image{source, hash, code})
	}
}

// There says whether this build embeds kernels.
func There() bool {
	list, err := files.ReadDir("packed")
	return err == nil && len(list) > 0
}

// Embedded returns the images of an architecture; none where this build has no such file.
func Embedded(arch string) ([]Image, error) {
	file, err := files.ReadFile("packed/" + arch + ".tar.zst")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return Unpack(file)
}

// Compiler returns the embedded images. Sources without one go to another compiler: user-
// defined operations, and GPUs older than compute capability 8.0. A Compiler may be used from
// several threads.
type Compiler struct {
	version int // CUDA version of the driver
	other   func() (cuda.Compiler, error)

	mu     sync.Mutex
	loaded map[string][]Image // by architecture
}

// New returns a Compiler for a driver of the given CUDA version, such as 12040. other is
// called the first time that a source has no embedded image.
func New(version int, other func() (cuda.Compiler, error)) *Compiler {
	return &Compiler{version: version, other: sync.OnceValues(other), loaded: map[string][]Image{}}
}

// Compile implements cuda.Compiler.
func (c *Compiler) Compile(name, source string, dev driver.Device) ([]byte, error) {
	for _, arch := range c.archs(dev) {
		code, err := c.find(arch, name, Hash(source))
		if code != nil || err != nil {
			return code, err
		}
	}
	other, err := c.other()
	if err != nil {
		return nil, err
	}
	return other.Compile(name, source, dev)
}

// archs lists the architectures whose images the GPU can run under the driver, the best
// first.
func (c *Compiler) archs(dev driver.Device) []string {
	switch {
	case dev.Major < 8:
		return nil
	case dev.Major <= 9 && c.version >= cubinDriver:
		return []string{fmt.Sprintf("sm_%d0", dev.Major), PTX}
	}
	return []string{PTX}
}

func (c *Compiler) find(arch, name, hash string) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list, ok := c.loaded[arch]
	if !ok {
		var err error
		if list, err = Embedded(arch); err != nil {
			return nil, err
		}
		c.loaded[arch] = list
	}
	for _, m := range list {
		if m.Source == name && m.Hash == hash {
			return m.Code, nil
		}
	}
	return nil, nil
}
