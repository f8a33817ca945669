package nvrtc

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// cache keeps compiled kernels in files named by source, architecture and a hash
// of everything that the result depends on. A file is
//
//	spillway kernel 1 SHA256-OF-THE-IMAGE newline image
//
// and is renamed into place, so that it is whole or not there. A folder that
// cannot be written or a file that is broken costs time and a warning only.
type cache struct {
	dir  string // empty: nothing is kept
	warn func(string)
}

const magic = "spillway kernel 1 "

func newCache(o Options) *cache {
	c := &cache{dir: o.Cache, warn: o.Warn}
	if c.warn == nil {
		c.warn = func(string) {}
	}
	switch o.Cache {
	case "-":
		c.dir = ""
	case "":
		dir, err := os.UserCacheDir()
		if err != nil {
			c.warn(fmt.Sprintf("compiled kernels are not kept: %v", err))
			return c
		}
		c.dir = filepath.Join(dir, "spillway", "cuda")
	}
	return c
}

func (c *cache) path(name, arch string, key []string) string {
	h := sha256.New()
	for _, s := range key {
		fmt.Fprintf(h, "%d:%s", len(s), s)
	}
	stem := strings.TrimSuffix(filepath.Base(name), ".cu")
	return filepath.Join(c.dir, stem+"-"+arch+"-"+hex.EncodeToString(h.Sum(nil))[:32]+".bin")
}

// get returns an image, nil where there is none that is whole.
func (c *cache) get(name, arch string, key []string) []byte {
	if c.dir == "" {
		return nil
	}
	path := c.path(name, arch, key)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		c.warn(fmt.Sprintf("the cache of compiled kernels cannot be read, %s is compiled again: %v", name, err))
		return nil
	}
	const head = len(magic) + 2*sha256.Size + 1
	if len(b) > head && string(b[:len(magic)]) == magic {
		image := b[head:]
		if sum := sha256.Sum256(image); string(b[len(magic):head]) == hex.EncodeToString(sum[:])+"\n" {
			return image
		}
	}
	c.warn(fmt.Sprintf("the cached kernels in %s are broken, %s is compiled again", path, name))
	return nil
}

func (c *cache) put(name, arch string, key []string, image []byte) {
	if c.dir == "" {
		return
	}
	if err := c.write(c.path(name, arch, key), image); err != nil {
		c.warn(fmt.Sprintf("the compiled kernels of %s are not kept: %v", name, err))
	}
}

func (c *cache) write(path string, image []byte) error {
	if err := os.MkdirAll(c.dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(c.dir, "tmp-*")
	if err != nil {
		return err
	}
	sum := sha256.Sum256(image)
	_, err = f.WriteString(magic + hex.EncodeToString(sum[:]) + "\n")
	if err == nil {
		_, err = f.Write(image)
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}
