package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Busy is the refusal of a folder that another process writes to.
type Busy struct {
	Dir    string
	Holder string // what the lock says of it: process, host, since when
}

func (e *Busy) Error() string {
	return fmt.Sprintf("another run has %s open (%s); wait for it, or give another folder", e.Dir, e.Holder)
}

// lock takes the folder's lock for this process until release: the kernel gives it
// back when the process ends, however it ends.
func lock(dir string) (filesys.File, error) {
	path := filepath.Join(dir, lockName)
	for {
		f, err := filesys.OpenFile(path, os.O_RDWR|os.O_CREATE|filesys.NoFollow, 0o666)
		if err != nil {
			return nil, err
		}
		ours, err := claim(f, path)
		if err != nil {
			return nil, err
		}
		if ours {
			return f, nil
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
}

// claim locks f and sees that it still has its name: the holder before removes it
// while it has the lock. It closes f on errors.
func claim(f filesys.File, path string) (ours bool, err error) {
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	st, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !st.Mode().IsRegular() {
		return false, fmt.Errorf("%s is not a regular file", path)
	}
	got, err := tryLock(f)
	if err != nil {
		return false, err
	}
	if !got {
		return false, &Busy{filepath.Dir(path), holder(f)}
	}
	now, err := filesys.Stat(path)
	if errors.Is(err, os.ErrNotExist) || err == nil && !filesys.SameFile(st, now) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	host, _ := os.Hostname() // "" where it has no name
	text := fmt.Sprintf("process %d on %s since %s\n", os.Getpid(), host, time.Now().UTC().Format(time.RFC3339))
	return true, errors.Join(f.Truncate(0), writeAt(f, text))
}

func writeAt(f filesys.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

// holder reads who has the lock.
func holder(f filesys.File) string {
	text, err := io.ReadAll(io.NewSectionReader(f, 0, 200))
	line, _, _ := strings.Cut(string(text), "\n")
	if err != nil || line == "" {
		return "it does not say which"
	}
	return fmt.Sprintf("%.80s", strings.Map(printable, line))
}

func printable(r rune) rune {
	if r < ' ' || r > '~' {
		return '?'
	}
	return r
}

// release removes the lock's name while it is still ours, and gives it back. A name
// that stays does no harm: a file that nobody has locked holds nobody up.
func release(f filesys.File) error {
	if ours, _ := f.Stat(); ours != nil {
		if named, _ := filesys.Stat(f.Name()); named != nil && filesys.SameFile(ours, named) {
			_ = filesys.Remove(f.Name())
		}
	}
	return f.Close()
}

// Held returns a *Busy if a process has dir open for writing. It changes nothing.
func Held(dir string) error {
	f, err := filesys.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|filesys.NoFollow, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	got, err := tryLock(f)
	if err == nil && !got {
		return &Busy{dir, holder(f)}
	}
	return err
}

// tryLock takes the lock of an open file; false where another process has it.
func tryLock(f filesys.File) (bool, error) {
	got, err := f.TryLock()
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return false, errors.New("checkpoint folders can't be locked on this system; two runs could write there at once")
	case err != nil:
		return false, fmt.Errorf("its filesystem gives no locks (flock: %w); two runs could write there at once", err)
	}
	return got, nil
}
