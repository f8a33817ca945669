package nvrtc

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/spillway-ml/spillway/internal/aside"
	"github.com/spillway-ml/spillway/internal/owned"
	"github.com/spillway-ml/spillway/internal/regular"
	"github.com/spillway-ml/spillway/internal/userdir"
)

// cache keeps compiled kernels in files named by source, architecture and a hash
// of everything that the result depends on. A file is
//
//	spillway kernel 1 SHA256-OF-THE-IMAGE newline image
//
// and is renamed into place, so that it is complete or absent. If the folder cannot be
// written or a file is damaged, the kernels are compiled again, with a warning. The same holds
// for a folder or file that other users may write, because its content runs on the device.
type cache struct {
	dir     string // empty: nothing is kept
	warn    func(string)
	foreign sync.Once // warns once about files of other users
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
		dir, err := userdir.Cache()
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

// get returns a cached image, or nil if there is none or it is damaged.
func (c *cache) get(name, arch string, key []string) []byte {
	if c.dir == "" {
		return nil
	}
	path := c.path(name, arch, key)
	b, err := c.read(path)
	if errors.Is(err, fs.ErrNotExist) || c.refused(err) {
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
			return slices.Clone(image) // not at the odd address behind the head: see driver.API.LoadModule
		}
	}
	c.warn(fmt.Sprintf("the cached kernels in %s are broken, %s is compiled again", path, name))
	return nil
}

// read returns a file's content if the folder and the file belong to the user alone.
func (c *cache) read(path string) ([]byte, error) {
	if err := owned.Folder(c.dir); err != nil {
		return nil, err
	}
	f, err := regular.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err == nil {
		err = owned.Check(path, st)
	}
	if err != nil {
		return nil, err
	}
	return io.ReadAll(f)
}

// refused tells whether err says that a file or folder is not the user's alone, and warns
// the first time.
func (c *cache) refused(err error) bool {
	var e *owned.Error
	if !errors.As(err, &e) {
		return false
	}
	c.foreign.Do(func() {
		c.warn(fmt.Sprintf("the cache of compiled kernels is not used, they are compiled again: %v", e))
	})
	return true
}

func (c *cache) put(name, arch string, key []string, image []byte) {
	if c.dir == "" {
		return
	}
	if err := c.write(c.path(name, arch, key), image); err != nil && !c.refused(err) {
		c.warn(fmt.Sprintf("the compiled kernels of %s are not kept: %v", name, err))
	}
}

func (c *cache) write(path string, image []byte) error {
	if err := owned.Make(c.dir); err != nil {
		return err
	}
	sum := sha256.Sum256(image)
	return aside.WriteBytes(path, slices.Concat([]byte(magic+hex.EncodeToString(sum[:])+"\n"), image), 0o600) // a file that others may write is not loaded
}
