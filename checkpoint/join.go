package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Joined is the open folder of a store that another process has open.
type Joined struct {
	Dir
	user int64

	o           filesys.Opener
	path, token string
	mu          sync.Mutex // held by Writing, which may change Dir and user
}

// Join opens, by its path on this host and its Token, the folder of a store that another
// process of the run has open.
func Join(o filesys.Opener, path, token string) (*Joined, error) {
	j := &Joined{o: o, path: path, token: token}
	if err := j.open(); err != nil {
		return nil, err
	}
	return j, nil
}

// open opens the folder that has the path now, if it is the store's.
func (j *Joined) open() error {
	d, err := OpenDir(j.o, j.path)
	if err == nil && d.f == nil {
		err = fmt.Errorf("open %s: %w", j.path, os.ErrNotExist)
	}
	if err != nil {
		return err
	}
	text, err := filesys.ReadFile(d.f, lockName, 1<<10)
	if err == nil && !slices.Contains(strings.Split(string(text), "\n"), j.token) {
		err = fmt.Errorf("%s on this host is not the folder that the run has open; give every process the same shared folder", j.path)
	}
	user := int64(filesys.NoOwner)
	if err == nil {
		user, err = d.f.Owner()
	}
	if err != nil {
		return errors.Join(err, d.Close())
	}
	j.Dir, j.user = d, user
	return nil
}

// Writing opens the folder of a Pending by its name. The store may have made the checkpoint
// folder again since Join (see Store.stillOurs): then the new one is opened first. It may be
// called concurrently.
func (j *Joined) Writing(name string) (filesys.Folder, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	f, err := j.writing(name, j.user)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	was := j.Dir
	if err := j.open(); err != nil {
		return nil, err
	}
	_ = was.Close() // everything written through it is synced
	return j.writing(name, j.user)
}

// writing opens the folder of a Pending by its name. The folder must belong to user.
func (d Dir) writing(name string, user int64) (filesys.Folder, error) {
	f, err := d.f.Sub(name)
	if err != nil {
		return nil, err
	}
	st, err := f.Info()
	if err == nil && st.Owner != user {
		err = fmt.Errorf("%s belongs to user %d now, not to %d: somebody has put another folder in its place", f.Path(), st.Owner, user)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
