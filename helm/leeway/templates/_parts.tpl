{{/* What several components need in their pods: secrets as variables, volumes, downloads. */}}

{{/* LEEWAY_REDIS_URL, and the password that it holds where Redis is the chart's own. Kubernetes
puts the password into the URL, so that no object but the Secret holds it. */}}
{{- define "leeway.redisEnv" -}}
{{- $redis := .Values.redis -}}
{{- $secret := $redis.existingSecret | default (include "leeway.fullname" .) -}}
{{- if $redis.enabled -}}
- name: LEEWAY_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ $redis.secretKeys.password }}
- name: LEEWAY_REDIS_URL
  value: redis://leeway:$(LEEWAY_REDIS_PASSWORD)@{{ include "leeway.fullname" . }}-redis:6379/0
{{- else -}}
- name: LEEWAY_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ $redis.secretKeys.url }}
{{- end -}}
{{- end -}}

{{/* (root, hasTokens): an annotation that restarts pods when the values give another password, URL or
token. A generated one is not in it: `helm template` makes a new one each time. */}}
{{- define "leeway.secretNotes" -}}
{{- $v := .root.Values -}}
{{- $given := list $v.redis.password $v.redis.url -}}
{{- if .hasTokens -}}
{{- $given = concat $given (list $v.api.tokens.read $v.api.tokens.control) -}}
{{- end -}}
{{- if compact $given -}}
checksum/secret: {{ $given | toJson | sha256sum }}
{{- end -}}
{{- end -}}

{{- define "leeway.tokenEnv" -}}
{{- $secret := .Values.api.tokens.existingSecret | default (include "leeway.fullname" .) -}}
- name: LEEWAY_API_READ_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ .Values.api.tokens.readKey }}
- name: LEEWAY_API_CONTROL_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ .Values.api.tokens.controlKey }}
{{- end -}}

{{/* Nothing but /tmp and the volumes can be written, and nothing is downloaded at run time. */}}
{{- define "leeway.commonEnv" -}}
- name: HOME
  value: /tmp
- name: TMPDIR
  value: /tmp
- name: HF_HUB_OFFLINE
  value: "1"
- name: TOKENIZERS_PARALLELISM
  value: "false"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- end -}}

{{/* (root, name): the volume source of `storage.NAME`. */}}
{{- define "leeway.storageSource" -}}
{{- $storage := get .root.Values.storage .name -}}
{{- if or $storage.enabled $storage.existingClaim -}}
persistentVolumeClaim:
  claimName: {{ $storage.existingClaim | default (printf "%s-%s" (include "leeway.fullname" .root) .name) }}
{{- else -}}
emptyDir: {}
{{- end -}}
{{- end -}}

{{/* (root, shm, runs): volumes of a pod that runs `leeway`. `runs` is the volume source of the run
directories, `shm` the size of /dev/shm. */}}
{{- define "leeway.volumes" -}}
- name: config
  configMap:
    name: {{ include "leeway.configMapName" .root }}
- name: tmp
  emptyDir: {}
- name: runs
  {{- .runs | nindent 2 }}
{{- if .shm }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .shm }}
- name: models
  {{- include "leeway.storageSource" (dict "root" .root "name" "models") | nindent 2 }}
- name: data
  {{- include "leeway.storageSource" (dict "root" .root "name" "data") | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (shm): the mounts of those volumes. */}}
{{- define "leeway.mounts" -}}
- name: config
  mountPath: /etc/leeway
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: runs
  mountPath: /var/lib/leeway/runs
{{- if .shm }}
- name: shm
  mountPath: /dev/shm
- name: models
  mountPath: /var/lib/leeway/models
  readOnly: true
- name: data
  mountPath: /var/lib/leeway/data
  readOnly: true
{{- end }}
{{- end -}}

{{/* (root): init containers that copy models and data from an object store. rclone writes beside
the file and renames it, so pods that share a volume may all do it, and the second finds it done. */}}
{{- define "leeway.fetch" -}}
{{- $root := . -}}
{{- $fetch := .Values.fetch -}}
{{- range $name := list "models" "data" }}
{{- $storage := get $root.Values.storage $name }}
{{- if $storage.source.remote }}
- name: fetch-{{ $name }}
  image: {{ include "leeway.image" (dict "root" $root "image" $fetch.image "outside" true) | quote }}
  imagePullPolicy: {{ $fetch.image.pullPolicy }}
  args:
    - copy
    - --config=/tmp/rclone.conf
    {{- range $storage.source.args }}
    - {{ . | quote }}
    {{- end }}
    - {{ $storage.source.remote | quote }}
    - /var/lib/leeway/{{ $name }}
  env:
    - name: HOME
      value: /tmp
  {{- with $storage.source.existingSecret }}
  envFrom:
    - secretRef:
        name: {{ . }}
  {{- end }}
  resources:
    {{- include "leeway.resources" $fetch.resources | nindent 4 }}
  securityContext:
    {{- toYaml $root.Values.securityContext | nindent 4 }}
  volumeMounts:
    - name: {{ $name }}
      mountPath: /var/lib/leeway/{{ $name }}
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- end }}
{{- end -}}
