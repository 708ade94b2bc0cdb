"""A file system that shows late what others have done, as NFS does: late_files.py BACKING MOUNT SECONDS

Every host has a mount of its own, and all have the same folder behind it. A mount reads a folder again only SECONDS after it has last done so,
and until then knows of what it has done itself alone: files of others are missing, and those that others have removed or replaced are there still. Sizes and
times are as old, unless a file is opened, which asks anew. What must be new (O_EXCL, mkdir, link) is decided behind it, for all, and whoever is told that it is there
already knows of it from then on. Takes fusepy and libfuse 2.
"""

import errno
import os
import stat
import sys
import threading
import time

from fuse import FUSE, FuseOSError, Operations

backing, mount, late = os.path.realpath(sys.argv[1]), sys.argv[2], float(sys.argv[3])
FIELDS = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid", "st_atime", "st_mtime", "st_ctime", "st_ino")


class Late(Operations):
    def __init__(self):
        self.folders = {}  # folder: (when it was read, {name: attributes})
        self.alone = threading.Lock()

    def __call__(self, op, path, *args):
        with self.alone:
            try:
                return super().__call__(op, path, *args)
            except FileExistsError:
                self.changed(path)
                raise

    def behind(self, path):
        return backing + path

    def attributes(self, path):
        found = os.lstat(self.behind(path))
        return {field: getattr(found, field) for field in FIELDS}

    def folder(self, folder):
        when, names = self.folders.get(folder, (0, {}))
        if time.monotonic() - when > late:
            names = {}
            for name in os.listdir(self.behind(folder)):
                try:
                    names[name] = self.attributes(os.path.join(folder, name))
                except FileNotFoundError:
                    pass
            self.folders[folder] = (time.monotonic(), names)
        return names

    def changed(self, path):
        """What this host has done itself it knows at once."""
        if path == "/":
            return
        names = self.folder(os.path.dirname(path))
        try:
            names[os.path.basename(path)] = self.attributes(path)
        except FileNotFoundError:
            names.pop(os.path.basename(path), None)

    def getattr(self, path, handle=None):
        if path == "/":
            return self.attributes(path)
        try:
            found = self.folder(os.path.dirname(path)).get(os.path.basename(path))
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if found is None:
            raise FuseOSError(errno.ENOENT)
        return found

    def readdir(self, path, handle):
        return [".", "..", *self.folder(path)]

    def open(self, path, info):
        # The kernel gives the place of every write.
        info.fh = os.open(self.behind(path), info.flags & ~os.O_APPEND)
        self.changed(path)
        return 0

    def create(self, path, mode, info):
        info.fh = os.open(self.behind(path), info.flags & ~os.O_APPEND | os.O_CREAT, mode)
        self.changed(path)
        return 0

    def read(self, path, size, offset, info):
        return os.pread(info.fh, size, offset)

    def write(self, path, data, offset, info):
        written = os.pwrite(info.fh, data, offset)
        self.changed(path)
        return written

    def truncate(self, path, length, info=None):
        os.truncate(self.behind(path), length)
        self.changed(path)

    def flush(self, path, info):
        return 0

    def fsync(self, path, datasync, info):
        return os.fsync(info.fh)

    def release(self, path, info):
        return os.close(info.fh)

    def mkdir(self, path, mode):
        os.mkdir(self.behind(path), mode)
        self.changed(path)

    def rmdir(self, path):
        os.rmdir(self.behind(path))
        self.folders.pop(path, None)
        self.changed(path)

    def unlink(self, path):
        os.unlink(self.behind(path))
        self.changed(path)

    def rename(self, old, new):
        os.rename(self.behind(old), self.behind(new))
        for folder in [folder for folder in self.folders if folder == old or folder.startswith(old + "/")]:
            del self.folders[folder]
        self.changed(old)
        self.changed(new)

    def link(self, new, old):
        os.link(self.behind(old), self.behind(new))
        self.changed(new)

    def symlink(self, new, old):
        os.symlink(old, self.behind(new))
        self.changed(new)

    def readlink(self, path):
        return os.readlink(self.behind(path))

    def chmod(self, path, mode):
        os.chmod(self.behind(path), mode)
        self.changed(path)

    def chown(self, path, user, group):
        os.chown(self.behind(path), user, group)
        self.changed(path)

    def utimens(self, path, times=None):
        os.utime(self.behind(path), times)
        self.changed(path)

    def statfs(self, path):
        found = os.statvfs(self.behind(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}


timeouts = {"entry_timeout": 0, "negative_timeout": 0, "attr_timeout": 0}
FUSE(Late(), mount, foreground=True, nothreads=False, raw_fi=True, big_writes=True, use_ino=True, **timeouts)
