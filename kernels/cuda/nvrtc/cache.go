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
// and is renamed into place, so that it is whole or not there. A folder that
// cannot be written or a file that is broken costs time and a warning only. So does
// a folder or a file that others may write: what is in it runs on the device.
type cache struct {
	dir     string // empty: nothing is kept
	warn    func(string)
	foreign sync.Once // the one warning about what is not the user's own
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

// get returns an image, nil where there is none that is whole.
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

// read returns a file of the folder, where both are the user's own.
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

// refused tells whether err is about something that is not the user's own, and warns
// of the first.
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
